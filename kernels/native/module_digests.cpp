// The Python face of digests.h. Takes addresses: native.py holds the tensors and has checked shapes and types.
#include <pybind11/pybind11.h>

#include <tuple>
#include <utility>

#include "digests.h"
#include "module.h"

namespace py = pybind11;

namespace kv {

void bind_digests(py::module_& module) {
    module.def("digest_slices", [](std::uintptr_t addresses, int count, const ShapeTuple& shape, std::uintptr_t into, const std::string& level) {
        const Level& chosen = level_of(level);
        const Shape of = shape_of(shape);
        const py::gil_scoped_release released;
        digest_slices(chosen, reinterpret_cast<const std::int64_t*>(addresses), count, of, reinterpret_cast<std::uint16_t*>(into));
    });
    module.def("digest_scores", [](std::pair<std::uintptr_t, std::uintptr_t> in, std::tuple<int, int, int, int> counts,
                                   std::pair<std::uintptr_t, std::uintptr_t> result, const std::string& level) {
        const Level& chosen = level_of(level);
        const auto [blocks, heads, group, dim] = counts;
        if (blocks < 0 || heads < 1 || group < 1 || dim < 1 || dim > kMaxSide) throw py::value_error("counts are out of the native range");
        const ScoreTask task{reinterpret_cast<const float*>(in.first), reinterpret_cast<const std::uint16_t*>(in.second), blocks, heads,
                             group, dim, reinterpret_cast<float*>(result.first), reinterpret_cast<float*>(result.second)};
        const py::gil_scoped_release released;
        digest_scores(chosen, task);
    });
}

}  // namespace kv
