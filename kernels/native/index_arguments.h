// Arguments that the index takes from Python, checked.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "index.h"

namespace kv {

namespace py = pybind11;

// Keys of a call: a list or tuple of bytes, whose memory stays while it is held.
class Keys {
public:
    explicit Keys(const py::handle& given) : held_(py::reinterpret_steal<py::object>(PySequence_Fast(given.ptr(), "keys are a sequence"))) {
        if (!held_) throw py::error_already_set();
        const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(held_.ptr()));
        PyObject** const items = PySequence_Fast_ITEMS(held_.ptr());
        found_.reserve(count);
        for (std::size_t i = 0; i < count; ++i) {
            if (!PyBytes_Check(items[i]) || PyBytes_GET_SIZE(items[i]) != static_cast<Py_ssize_t>(kKeyBytes))
                throw py::value_error("keys[" + std::to_string(i) + "] is no key of 32 bytes");
            found_.push_back(reinterpret_cast<const std::uint8_t*>(PyBytes_AS_STRING(items[i])));
        }
    }
    std::size_t size() const { return found_.size(); }
    const std::uint8_t* const* data() const { return found_.data(); }
    const std::uint8_t* operator[](std::size_t i) const { return found_[i]; }

private:
    py::object held_;
    std::vector<const std::uint8_t*> found_;
};

inline std::int32_t checked(const Index& index, long long slot) {
    if (slot < 0 || slot >= index.top()) throw py::index_error("slot " + std::to_string(slot) + " was never used");
    return static_cast<std::int32_t>(slot);
}

inline long long number_of(PyObject* object) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
}

}  // namespace kv
