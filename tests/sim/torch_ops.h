// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace sim {

// What the first operator that failed on the executor said; empty: none failed. On a GPU it would be a sticky error.
std::string first_error();

} // namespace sim
