#include "isa.h"

#include <cstdlib>

namespace attnspan {

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::neon: return "neon";
    default: return "scalar";
  }
}

std::vector<Isa> supported() {
  std::vector<Isa> found{Isa::scalar};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) found.push_back(Isa::avx2);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.push_back(Isa::avx512);
  }
#elif defined(__aarch64__)
  found.push_back(Isa::neon);
#endif
  return found;
}

IsaChoice choose_isa(const char* forced) {
  const std::vector<Isa> here = supported();
  if (forced == nullptr || *forced == '\0') return {here.back(), ""};
  std::string names;
  for (const Isa isa : here) {
    if (forced == std::string(name_of(isa))) return {isa, ""};
    names += (names.empty() ? "" : ", ") + std::string(name_of(isa));
  }
  return {Isa::scalar, "ATTNSPAN_ISA: given " + std::string(forced) +
                           ", needed an instruction set of this machine: " + names +
                           "; unset it to take the best"};
}

const IsaChoice& isa_in_use() {
  static const IsaChoice choice = choose_isa(std::getenv("ATTNSPAN_ISA"));
  return choice;
}

}  // namespace attnspan
