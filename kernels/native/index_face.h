// The index of blocks as a Python class of the extension; kernels/native.py is its only importer.
#pragma once

#include <pybind11/pybind11.h>

namespace kv {

void define_index(pybind11::module_& module);

}  // namespace kv
