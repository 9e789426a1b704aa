// The operations for any processor.
#include "isa.hpp"
namespace coppice {
namespace portable {
namespace {
#include "vec_portable.hpp"
#include "elements.hpp"
#include "blocks.hpp"
#include "linear.hpp"
#include "rows.hpp"
#include "chunk.hpp"
#include "attention.hpp"
#include "best.hpp"
#include "sample.hpp"
}  // namespace
}  // namespace portable
const Kernels kPortable = {"portable", portable::linear, portable::rms_norm, portable::rope, portable::silu_mul, portable::attention, portable::best, portable::sample};
}  // namespace coppice
