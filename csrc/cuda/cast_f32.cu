#include "cast.cuh"

template void mh::cuda::launch_cast<mh::Float32>(const CastArgs&, Kind, Kind, const Where&);
template void mh::cuda::launch_groups<mh::Float32>(const CastArgs&, Kind, const Where&);
