// Casts of whole tensors by strips (dense_strips.cu).
#pragma once

#include "cast.h"

namespace mh::cuda {

// Whether strips fit the tensor and what its rows, its columns or both are cast to. `any`: also what strips can be cast
// to and are not (`kStripScales`).
bool fits_dense_strips(const CastArgs& args, bool rows, bool cols, bool any);
void launch_dense_strips(const StripArgs& args, bool rows, bool cols, const Where& where);

// The same where one of both is NVFP4 (fp4_strips.cu).
void launch_fp4_strips(const StripArgs& args, Kind row, Kind col, const Where& where);

// Amaxes of columns, and of rows unless of_rows is null, in one read, whatever was there before.
void launch_dense_amaxes(const StripArgs& args, const Where& where);

// The same of rows alone, `a.row`, whose amaxes are to be found: whole rows at once (whole_rows.cu). Writes of_rows too.
bool fits_whole_rows(const CastArgs& args);
void launch_whole_rows(const StripArgs& args, const Where& where);

}  // namespace mh::cuda
