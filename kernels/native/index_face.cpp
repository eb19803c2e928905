// The Python face of the index: columns as buffers, and the steps of calls that have many keys, each in one call.
//
// Everything runs with the store's lock and the interpreter's own held. Slots and copy numbers that come from Python are
// checked against the slots that there are, so that a wrong one raises and reads no other memory.
#include "index_face.h"

#include <poll.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "index.h"
#include "index_arguments.h"
#include "index_reader.h"

namespace py = pybind11;

namespace kv {

namespace {

using Held = std::shared_ptr<Index>;

// A column and the index that it is of: views of it keep the memory.
struct View {
    Held index;
    void* data;
    std::size_t itemsize, count;
    std::string format;
};

template <typename T>
View view_of(const Held& index, Column<T>& column) {
    return {index, column.data(), sizeof(T), column.size(), py::format_descriptor<T>::format()};
}

View column(const Held& index, const std::string& name, int tier) {
    if (name == "parent") return view_of(index, index->parent);
    if (name == "children") return view_of(index, index->children);
    if (name == "namespace") return view_of(index, index->spaces);
    if (name == "last_use") return view_of(index, index->last_use);
    if (name == "residency") return view_of(index, index->residency);
    if (name == "codec") return view_of(index, index->codec);
    if (name == "depth") return view_of(index, index->depth);
    if (name == "hits") return view_of(index, index->hits);
    TierColumns& of = index->need(tier);
    if (name == "place") return view_of(index, of.place);
    if (name == "kids") return view_of(index, of.kids);
    if (name == "colder") return view_of(index, of.colder);
    if (name == "hotter") return view_of(index, of.hotter);
    throw py::value_error("there is no column " + name);
}

const std::uint8_t* key_of(const py::bytes& key) {
    if (PyBytes_GET_SIZE(key.ptr()) != static_cast<Py_ssize_t>(kKeyBytes)) throw py::value_error("key is not 32 bytes long");
    return reinterpret_cast<const std::uint8_t*>(PyBytes_AS_STRING(key.ptr()));
}

std::vector<std::int32_t> slots_of(const Index& index, const py::list& given) {
    std::vector<std::int32_t> slots(given.size());
    for (std::size_t i = 0; i < slots.size(); ++i)
        slots[i] = checked(index, number_of(PyList_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i))));
    return slots;
}

void append(const py::list& list, PyObject* stolen) {
    const py::object held = py::reinterpret_steal<py::object>(stolen);
    if (!held || PyList_Append(list.ptr(), stolen) != 0) throw py::error_already_set();
}

// ---------------------------------------------------------------- looking up

struct Finder {
    Held index;
    std::uint32_t space;
};

// (key, default=-1) -> slot: a plain C function, since a commit calls it several times a block.
PyObject* find(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    const auto* const finder = static_cast<Finder*>(PyCapsule_GetPointer(self, nullptr));
    if (finder == nullptr) return nullptr;
    if (count < 1 || count > 2 || !PyBytes_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "a key of 32 bytes is expected, and what stands for none");
        return nullptr;
    }
    std::int32_t slot = kNone;
    if (PyBytes_GET_SIZE(arguments[0]) == static_cast<Py_ssize_t>(kKeyBytes))
        slot = finder->index->find(finder->space, reinterpret_cast<const std::uint8_t*>(PyBytes_AS_STRING(arguments[0])));
    if (slot == kNone && count == 2) return Py_NewRef(arguments[1]);
    return PyLong_FromLong(slot);
}

PyMethodDef find_method = {"find", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&find)), METH_FASTCALL,
                           "Slot of a key, or -1 (or what is given instead)."};

py::object finder(const Held& index, std::uint32_t space) {
    const py::capsule self(new Finder{index, space}, [](void* at) { delete static_cast<Finder*>(at); });
    return py::reinterpret_steal<py::object>(PyCFunction_New(&find_method, self.ptr()));
}

py::bytes match(const Index& index, std::uint32_t space, const py::handle& given, std::uint8_t readable) {
    const Keys keys(given);
    std::vector<std::int32_t> slots(keys.size());
    std::string found(keys.size(), '\0');
    index.find_all(space, keys.data(), keys.size(), slots.data());
    std::size_t run = 0;
    for (; run < slots.size(); ++run) {
        const std::uint8_t bits = slots[run] == kNone ? 0 : index.residency[slots[run]] & readable;
        if (bits == 0) break;
        found[run] = static_cast<char>(bits);
    }
    return {found.data(), run};
}

// See Matches in kvstore/client/flow_match.py. `peer` is the socket whose other end changes the index; -1 for none.
py::tuple match_mapped(const MappedIndex& mapped, std::uint32_t space, const py::bytes& name, const py::handle& given, int peer) {
    const Keys keys(given);
    std::string found(keys.size(), '\0');
    std::size_t run = 0;
    pollfd looked{peer, POLLRDHUP, 0};
    // Memory outlives who wrote it: nothing is found where nobody keeps it true any more.
    if (peer < 0 || poll(&looked, 1, 0) == 0) run = mapped.reader().match(space, key_of(name), keys.data(), keys.size(), found.data());
    py::tuple residency(run);
    for (std::size_t i = 0; i < run; ++i)
        PyTuple_SET_ITEM(residency.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLong(static_cast<unsigned char>(found[i])));
    return residency;
}

// Where the copies of one tier and kind lie: what is added to an offset, then area, stride and codec of the place.
struct Form {
    std::int64_t first = 0;
    py::object area, stride, codec;
};

Form form_of(const py::tuple& forms, std::size_t at) {
    const py::tuple form = forms[at];
    return {form[0].cast<std::int64_t>(), form[1], form[2], form[3]};
}

// The version of a page, of a table that exports memory; 0 of one that does not.
class PageVersions {
public:
    explicit PageVersions(const py::handle& table) {
        if (PyObject_CheckBuffer(table.ptr()) && PyObject_GetBuffer(table.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
    }
    ~PageVersions() {
        if (view_.obj != nullptr) PyBuffer_Release(&view_);
    }
    PageVersions(const PageVersions&) = delete;
    PageVersions& operator=(const PageVersions&) = delete;
    std::uint64_t operator[](std::int64_t page) const {
        if (view_.obj == nullptr) return 0;
        if (page < 0 || 8 * page + 8 > view_.len) throw py::index_error("a place is beyond its arena");
        return static_cast<const std::uint64_t*>(view_.buf)[page];
    }

private:
    Py_buffer view_{};
};

struct Asked {
    std::uint32_t space;
    std::uint8_t readable;
    std::string wanted;  // by residency bits: number of the tier that is read, 0 where bytes have to move first
};

// Places of copies that lie where they are wanted, as tuples of the type that is given.
class Places {
public:
    Places(const py::tuple& forms, const py::list& versions, const py::object& type) : forms_(forms), versions_(versions), type_(type) {
        if (!PyType_Check(type.ptr()) || !PyType_IsSubtype(kind(), &PyTuple_Type)) throw py::type_error("a place is a tuple");
    }
    PyObject* make(const Index& index, std::int32_t slot, int tier) {
        const std::size_t at = static_cast<std::size_t>(tier) * kKinds + (index.codec[slot] & (kKinds - 1));
        if (at >= sizeof known_ / sizeof known_[0]) throw py::index_error("a place in a tier that is not addressed");
        if (!known_[at]) known_[at] = std::make_unique<Form>(form_of(forms_, at));
        if (!pages_[tier]) pages_[tier] = std::make_unique<PageVersions>(versions_[tier]);
        const std::int64_t offset = std::int64_t{index.need(tier).place[slot]} * 4096 + known_[at]->first;
        py::object begin = py::int_(offset), version = py::int_((*pages_[tier])[offset / 4096]);
        PyObject* const place = kind()->tp_alloc(kind(), 5);
        if (place == nullptr) throw py::error_already_set();
        PyTuple_SET_ITEM(place, 0, known_[at]->area.inc_ref().ptr());
        PyTuple_SET_ITEM(place, 1, begin.release().ptr());
        PyTuple_SET_ITEM(place, 2, known_[at]->stride.inc_ref().ptr());
        PyTuple_SET_ITEM(place, 3, known_[at]->codec.inc_ref().ptr());
        PyTuple_SET_ITEM(place, 4, version.release().ptr());
        return place;
    }

private:
    PyTypeObject* kind() const { return reinterpret_cast<PyTypeObject*>(type_.ptr()); }
    const py::tuple& forms_;
    const py::list& versions_;
    const py::object& type_;
    std::unique_ptr<Form> known_[3 * kKinds];
    std::unique_ptr<PageVersions> pages_[3];
};

// See BlockIndex.fetch in kvstore/store/columns/index.py.
py::tuple fetch(Index& index, const py::tuple& asked, const py::handle& given, const py::object& lease_pins, const py::tuple& forms,
                const py::list& versions, const py::object& place_type) {
    const Asked what{asked[0].cast<std::uint32_t>(), asked[1].cast<std::uint8_t>(), asked[2].cast<std::string>()};
    if (what.wanted.size() != 256) throw py::value_error("wanted has 256 entries");
    const Keys keys(given);
    std::vector<std::int32_t> slots(keys.size());
    index.find_all(what.space, keys.data(), keys.size(), slots.data());
    const bool pinning = !lease_pins.is_none();
    if (pinning && !PyDict_Check(lease_pins.ptr())) throw py::type_error("a lease's pins are a dict");
    Places told_places(forms, versions, place_type);
    py::list told(keys.size()), missing, moving, hits, places, fresh;
    std::string bits;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const std::int32_t slot = slots[i];
        const bool found = slot != kNone && index.residency[slot] & what.readable;
        PyList_SET_ITEM(told.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLong(found ? slot : kNone));
        if (!found) {
            append(missing, PyLong_FromSize_t(i));
            continue;
        }
        bits.push_back(static_cast<char>(index.residency[slot]));
        const int tier = what.wanted[index.residency[slot]];
        append(tier == 0 ? moving : hits, PyLong_FromSize_t(i));
        if (tier == 0 || !pinning) continue;
        append(places, told_places.make(index, slot, tier));
        const py::object number = py::int_(std::int64_t{slot} << kTierBits | tier);
        const int known = PyDict_Contains(lease_pins.ptr(), number.ptr());
        if (known < 0) throw py::error_already_set();
        if (known > 0) continue;
        if (PyDict_SetItem(lease_pins.ptr(), number.ptr(), Py_None) != 0) throw py::error_already_set();
        if (index.pin(slot, tier) && !index.need(tier).lists) fresh.append(number);
    }
    return py::make_tuple(told, missing, moving, hits, places, py::bytes(bits), fresh);
}

// See BlockIndex.enter.
py::tuple enter(Index& index, std::uint32_t space, int tier, const py::list& given, const py::list& above, const py::list& handles, const py::bytes& kinds) {
    const Keys keys(given), parents(above);
    const std::string kind = kinds;
    if (parents.size() != keys.size() || handles.size() != keys.size() || kind.size() != keys.size()) throw py::value_error("columns differ in length");
    std::vector<Recovered> blocks(keys.size());
    for (std::size_t i = 0; i < blocks.size(); ++i)
        blocks[i] = {keys[i], parents[i], static_cast<std::uint32_t>(number_of(PyList_GET_ITEM(handles.ptr(), static_cast<Py_ssize_t>(i)))), static_cast<std::uint8_t>(kind[i])};
    Entered done = index.enter(space, tier, blocks);
    return py::make_tuple(std::move(done.refused), std::move(done.slots), done.added, done.fresh, std::move(done.kinds));
}

// ---------------------------------------------------------------- pins and uses

// Numbers of copies that are pinned now and were not, of tiers whose list is not kept here.
py::list pin_all(Index& index, const py::list& numbers) {
    py::list fresh;
    for (const py::handle number : numbers) {
        const long long value = number_of(number.ptr());
        const int tier = static_cast<int>(value & ((1 << kTierBits) - 1));
        const std::int32_t slot = checked(index, value >> kTierBits);
        if (index.pin(slot, tier) && !index.need(tier).lists) fresh.append(number);
    }
    return fresh;
}

// Numbers of copies that are pinned no more: READY ones of tiers whose list is not kept here, and those not READY.
std::pair<py::list, py::list> unpin_all(Index& index, const py::list& numbers) {
    py::list released, gone;
    for (const py::handle number : numbers) {
        const long long value = number_of(number.ptr());
        const int tier = static_cast<int>(value & ((1 << kTierBits) - 1));
        const std::int32_t slot = checked(index, value >> kTierBits);
        if (!index.unpin(slot, tier)) continue;
        if (!(index.residency[slot] >> (tier - 1) & 1)) gone.append(number);
        else if (!index.need(tier).lists) released.append(number);
    }
    return {released, gone};
}

std::uint32_t pins_of(const Index& index, long long number) {
    const TierColumns* const tier = index.tier(static_cast<int>(number & ((1 << kTierBits) - 1)));
    const long long slot = number >> kTierBits;
    return tier == nullptr || slot < 0 || slot >= index.top() ? 0 : tier->pins[slot];
}

std::vector<std::int64_t> pinned(const Index& index) {
    std::vector<std::int64_t> numbers;
    for (int number = 1; number <= kIndexTiers; ++number) {
        const TierColumns* const tier = index.tier(number);
        if (tier == nullptr || tier->pinned == 0) continue;
        for (std::int32_t slot = 0; slot < index.top(); ++slot)
            if (tier->pins[slot] != 0) numbers.push_back(std::int64_t{slot} << kTierBits | number);
    }
    return numbers;
}

std::size_t pinned_count(const Index& index) {
    std::size_t count = 0;
    for (int number = 1; number <= kIndexTiers; ++number)
        if (const TierColumns* const tier = index.tier(number)) count += tier->pinned;
    return count;
}

// ---------------------------------------------------------------- lists and listings

py::list list_from(const Index& index, int tier, bool aside) {
    const TierColumns& of = index.need(tier);
    py::list found;
    for (std::int32_t slot = aside ? of.set_aside.cold : of.listed.cold; slot != kNone; slot = of.hotter[slot]) append(found, PyLong_FromLong(slot));
    return found;
}

// (namespace, key, slot) of the slots in use from `begin` up to `end`: of one namespace, or of all for -1.
py::list blocks(const Index& index, long long space, long long begin, long long end) {
    py::list found;
    for (std::int32_t slot = static_cast<std::int32_t>(begin < 0 ? 0 : begin); slot < index.top() && slot < end; ++slot) {
        if (!index.in_use(slot) || (space >= 0 && index.spaces[slot] != space)) continue;
        found.append(py::make_tuple(index.spaces[slot], py::bytes(reinterpret_cast<const char*>(index.keys[slot].bytes), kKeyBytes), slot));
    }
    return found;
}

py::list with_prefix(const Index& index, const std::string& prefix, long long begin, long long end) {
    py::list found;
    if (prefix.size() > kKeyBytes) return found;
    for (std::int32_t slot = static_cast<std::int32_t>(begin < 0 ? 0 : begin); slot < index.top() && slot < end; ++slot)
        if (index.in_use(slot) && std::memcmp(index.keys[slot].bytes, prefix.data(), prefix.size()) == 0) append(found, PyLong_FromLong(slot));
    return found;
}

py::object key_at(const Index& index, long long slot) {
    if (slot < 0 || slot >= index.top() || !index.in_use(static_cast<std::int32_t>(slot))) return py::none();
    return py::bytes(reinterpret_cast<const char*>(index.keys[slot].bytes), kKeyBytes);
}

}  // namespace

void define_index(py::module_& module) {
    py::class_<View>(module, "Column", py::buffer_protocol()).def_buffer([](View& view) {
        return py::buffer_info(view.data, static_cast<py::ssize_t>(view.itemsize), view.format, 1,
                               {static_cast<py::ssize_t>(view.count)}, {static_cast<py::ssize_t>(view.itemsize)});
    });
    const auto on = [](void (Index::*step)(int, std::int32_t)) {
        return [step](Index& index, int tier, long long slot) { (index.*step)(tier, checked(index, slot)); };
    };
    py::class_<Index, Held>(module, "Index")
        .def(py::init([](const std::vector<int>& tiers, std::size_t slots_max, bool shared) {
            return std::make_shared<Index>(tiers, slots_max < kSlotsMax ? slots_max : kSlotsMax, shared);
        }))
        .def("fd", [](const Index& index) { return index.memory().fd(); })
        .def("name", [](Index& index, std::uint32_t space, const py::bytes& name) { index.name(space, key_of(name)); })
        .def("set_readable", &Index::set_readable)
        .def("__len__", &Index::count)
        .def("column", &column)
        .def("finder", &finder)
        .def("add", [](Index& index, const py::bytes& key, std::int32_t parent, std::uint32_t space, std::uint32_t depth) {
            return index.add(key_of(key), parent < 0 ? parent : checked(index, parent), space, depth);
        })
        .def("adopt", [](Index& index, long long slot, std::int32_t parent, std::uint32_t depth) { index.adopt(checked(index, slot), parent < 0 ? parent : checked(index, parent), depth); })
        .def("orphan", [](Index& index, long long slot) { index.orphan(checked(index, slot)); })
        .def("delete", [](Index& index, long long slot) { index.remove(checked(index, slot)); })
        .def("key_at", &key_at)
        .def("top", &Index::top)
        .def("table_bytes", &Index::table_bytes).def("match", &match)
        .def("enter", &enter)
        .def("fetch", &fetch)
        .def("note", [](Index& index, const py::list& slots, std::uint32_t ticks) {
            const std::vector<std::int32_t> used = slots_of(index, slots);
            index.note(used.data(), used.size(), ticks);
        })
        .def("know", &Index::know)
        .def("set_kind", [](Index& index, long long slot, std::uint8_t kind) { index.set_kind(checked(index, slot), kind); })
        .def("pin_all", &pin_all)
        .def("unpin_all", &unpin_all)
        .def("pins_of", &pins_of)
        .def("pinned", &pinned)
        .def("pinned_count", &pinned_count)
        .def("pinned_bytes", [](const Index& index, int tier) { return index.tier(tier) == nullptr ? 0 : index.tier(tier)->pinned_bytes; })
        .def("keep_list", [](Index& index, int tier) { index.need(tier).lists = true; })
        .def("use", on(&Index::use))
        .def("take", on(&Index::take))
        .def("set_aside", on(&Index::set_aside))
        .def("return_cold", on(&Index::return_cold))
        .def("reconsider_all", [](Index& index, int tier) { index.reconsider_all(tier); })
        .def("use_known", [](Index& index, int tier, const py::list& slots) {
            for (const std::int32_t slot : slots_of(index, slots)) index.use_if_known(tier, slot);
        })
        .def("coldest", [](const Index& index, int tier) { return index.need(tier).listed.cold; })
        .def("hottest", [](const Index& index, int tier) { return index.need(tier).listed.hot; })
        .def("coldest_aside", [](const Index& index, int tier) { return index.need(tier).set_aside.cold; })
        .def("is_aside", [](const Index& index, int tier, long long slot) { return index.need(tier).aside[checked(index, slot)] != 0; })
        .def("list_from", &list_from)
        .def("blocks", &blocks)
        .def("with_prefix", &with_prefix);
    py::class_<MappedIndex>(module, "MappedIndex").def(py::init<int>()).def("match", &match_mapped);
}

}  // namespace kv
