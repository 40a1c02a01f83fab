#define MH_ISA baseline
#include "kernels_isa.inc"
