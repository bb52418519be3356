// Bindings of attention and the KV cache.
#include "bind.h"

namespace quire {

void bind_attention(nanobind::module_&) {}

}  // namespace quire
