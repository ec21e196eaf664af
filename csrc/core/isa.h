// Which instruction set the kernels are taken from.
#pragma once

#include <string>
#include <vector>

namespace attnspan {

// scalar is the compiler's baseline for the machine; avx2 includes FMA; avx512 is F, BW, DQ and VL.
enum class Isa { scalar, avx2, avx512, neon };

const char* name_of(Isa isa);

// What this machine can run, the best last.
std::vector<Isa> supported();

struct IsaChoice {
  Isa isa;
  std::string error;  // empty if the choice stands
};

// Takes the best, or the one that `forced` names (null or "" forces none).
IsaChoice choose_isa(const char* forced);

// choose_isa of the environment variable ATTNSPAN_ISA, read once.
const IsaChoice& isa_in_use();

}  // namespace attnspan
