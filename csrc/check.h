// Failed checks become Python exceptions: std::invalid_argument is ValueError there.
#pragma once

#include <sstream>
#include <stdexcept>

namespace rlk {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

}  // namespace rlk
