// Passes that only look: the outer amaxes a cast must know before it starts.
#pragma once

#include "launch.h"

namespace mh::cuda {

// Takes the amaxes that the directions of a cast ask for, in one pass where both can share it.
void measure(const PairArgs& args, const Where& where);

// Amaxes of groups by strips; false where these do not fit the tensor.
bool amax_by_strips(const GroupAmaxArgs& args, const Where& where);

}  // namespace mh::cuda
