#define MH_ISA avx512
#include "kernels_isa.inc"
