#include "cast.cuh"

template void mh::cuda::launch_cast<mh::BFloat16>(const CastArgs&, Kind, Kind, const Where&);
template void mh::cuda::launch_groups<mh::BFloat16>(const CastArgs&, Kind, const Where&);
