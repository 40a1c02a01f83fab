// Which instruction set the CPU loops use.
#pragma once

#include <string>
#include <vector>

namespace mh::cpu {

std::string isa();                 // in use
std::vector<std::string> isas();   // that this processor runs
void set_isa(const std::string&);  // for tests and bug reports; not for while casts run

}  // namespace mh::cpu
