#define MH_ISA avx2
#include "kernels_isa.inc"
