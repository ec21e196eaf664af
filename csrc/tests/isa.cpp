// Which instruction set is taken, and what a wrong name is told.
#include "../core/isa.h"

#include "../core/dispatch.h"
#include "../core/softmax.h"
#include "check.h"

using namespace attnspan;

TEST(the_best_is_taken_unless_one_is_forced) {
  CHECK(supported().front() == Isa::scalar);
  CHECK(choose_isa(nullptr).isa == supported().back() && choose_isa("").isa == supported().back());
  for (const Isa isa : supported()) {
    const IsaChoice choice = choose_isa(name_of(isa));
    CHECK(choice.isa == isa && choice.error.empty());
  }
}

TEST(an_unknown_instruction_set_is_refused_with_the_list) {
  for (const char* name : {"avx", "AVX2", "sse4.2", " "}) {
    const std::string error = choose_isa(name).error;
    CHECK(error.find("ATTNSPAN_ISA: given " + std::string(name)) == 0);
    for (const Isa isa : supported()) CHECK(error.find(name_of(isa)) != std::string::npos);
  }
#if defined(__x86_64__)
  CHECK(!choose_isa("neon").error.empty());
#endif
}

TEST(there_is_always_a_kernel) { CHECK(kernels().softmax_rows == softmax_rows); }
