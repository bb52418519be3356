// Bindings of log-softmax and sampling.
#include "bind.h"

namespace quire {

void bind_sampling(nanobind::module_&) {}

}  // namespace quire
