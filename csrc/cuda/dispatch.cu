// Which kernels a call gets.
#include <stdexcept>

#include "kernels.h"
#include "simple.h"

namespace mh::cuda {
namespace {

bool tiles_on = false;

}  // namespace

void use_tiles(bool on) { tiles_on = on; }

void amax(const AmaxArgs& args, const Where& where) { return tiles_on ? tiles::amax(args, where) : simple::amax(args, where); }

void quantize(const PairArgs& args, const Where& where) {
  if (tiles_on) return tiles::quantize(args, where);
  if (args.derived || (args.has_row && args.row.measured) || (args.has_col && args.col.measured))
    throw std::invalid_argument("the simple CUDA kernels neither derive columns nor take amaxes while they cast");
  if (args.has_row) simple::quantize(args.row, where);
  if (args.has_col) simple::quantize(args.col, where);
}

void dequantize(const DequantizeArgs& args, const Where& where) {
  return tiles_on ? tiles::dequantize(args, where) : simple::dequantize(args, where);
}

}  // namespace mh::cuda
