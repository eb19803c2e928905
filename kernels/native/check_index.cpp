// The index against a map and plain lists, whatever is done, with the sanitizers looking on; see check_main.cpp.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <list>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "index.h"

namespace {

using Name = std::pair<std::uint32_t, std::string>;

int wrong = 0;

void expect(bool ok, const char* what) {
    if (ok) return;
    ++wrong;
    std::printf("FAILED: %s\n", what);
}

const std::uint8_t* bytes(const std::string& key) { return reinterpret_cast<const std::uint8_t*>(key.data()); }

std::vector<std::int32_t> listed(const kv::Index& index, int tier, bool aside) {
    std::vector<std::int32_t> found;
    const kv::TierColumns& of = index.need(tier);
    std::int32_t colder = kv::kNone;
    for (std::int32_t slot = aside ? of.set_aside.cold : of.listed.cold; slot != kv::kNone; slot = of.hotter[slot]) {
        expect(of.colder[slot] == colder, "links meet");
        found.push_back(slot);
        colder = slot;
    }
    expect(colder == (aside ? of.set_aside.hot : of.listed.hot), "the hot end is the last");
    return found;
}

// Names come and go; every look finds what a map has, while the table grows and shrinks under it.
void check_names(std::uint32_t seed) {
    std::mt19937 random(seed);
    kv::Index index({2, 3}, 1 << 16);
    std::map<Name, std::int32_t> known;
    std::vector<Name> names;
    for (int i = 0; i < 30000; ++i) {
        std::string key(kv::kKeyBytes, static_cast<char>(seed));
        const std::uint32_t number = i / 2;
        std::memcpy(key.data() + 8, &number, sizeof number);
        names.emplace_back(i % 2, key);
    }
    for (int step = 0; step < 120000; ++step) {
        const Name& name = names[random() % (step < 60000 ? names.size() : 4000)];
        const auto found = known.find(name);
        const std::int32_t slot = index.find(name.first, bytes(name.second));
        expect(slot == (found == known.end() ? kv::kNone : found->second), "a name's slot is the map's");
        if (found == known.end()) {
            known[name] = index.add(bytes(name.second), kv::kNone, name.first, step % 70000);
        } else if (random() % 3 == 0) {
            index.remove(slot);
            known.erase(found);
        }
    }
    expect(index.count() == known.size(), "as many as the map has");
    for (const std::uint32_t space : {0u, 1u}) {
        std::vector<const std::uint8_t*> wanted;
        std::vector<std::int32_t> slots(names.size());
        for (const Name& name : names) wanted.push_back(bytes(name.second));
        index.find_all(space, wanted.data(), wanted.size(), slots.data());
        for (std::size_t i = 0; i < names.size(); ++i) {
            const auto found = known.find({space, names[i].second});
            expect(slots[i] == (found == known.end() ? kv::kNone : found->second), "many at once are the map's");
        }
    }
}

void check_lists(std::uint32_t seed) {
    std::mt19937 random(seed);
    kv::Index index({2}, 64);
    index.need(2).lists = true;
    std::list<std::int32_t> plain, aside;
    for (std::uint8_t i = 0; i < 40; ++i) index.add(bytes(std::string(kv::kKeyBytes, static_cast<char>(i))), kv::kNone, 0, 0);
    for (int step = 0; step < 20000; ++step) {
        const auto slot = static_cast<std::int32_t>(random() % 40);
        const bool in_list = std::find(plain.begin(), plain.end(), slot) != plain.end();
        const bool is_aside = std::find(aside.begin(), aside.end(), slot) != aside.end();
        switch (random() % 6) {
            case 0: index.use(2, slot); plain.remove(slot); aside.remove(slot); plain.push_back(slot); break;
            case 1: index.take(2, slot); plain.remove(slot); aside.remove(slot); break;
            case 2: if (in_list) { index.set_aside(2, slot); plain.remove(slot); aside.push_back(slot); } break;
            case 3: index.return_cold(2, slot); if (is_aside) { aside.remove(slot); plain.push_front(slot); } break;
            case 4: if (step % 50 == 0) { index.reconsider_all(2); plain.splice(plain.begin(), aside); } break;
            default:
                index.note(&slot, 1, static_cast<std::uint32_t>(step));
                if (in_list || is_aside) { plain.remove(slot); aside.remove(slot); plain.push_back(slot); }
        }
        expect(listed(index, 2, false) == std::vector<std::int32_t>(plain.begin(), plain.end()), "the list is the plain one");
        expect(listed(index, 2, true) == std::vector<std::int32_t>(aside.begin(), aside.end()), "so is what is set aside");
    }
}

void check_pins() {
    kv::Index index({2}, 64);
    index.need(2).lists = true;
    index.know(0, std::vector<std::int64_t>((kv::kIndexTiers + 1) * kv::kKinds, 100));
    const std::int32_t slot = index.add(bytes(std::string(kv::kKeyBytes, 'k')), kv::kNone, 0, 0);
    index.residency[slot] = 2;
    index.use(2, slot);
    expect(index.pin(slot, 2) && !index.pin(slot, 2) && listed(index, 2, false).empty(), "a pin takes it off the list");
    expect(index.need(2).pinned == 1 && index.need(2).pinned_bytes == 100, "its bytes are pinned once");
    expect(!index.unpin(slot, 2) && index.unpin(slot, 2) && listed(index, 2, false).size() == 1, "the last unpin brings it back");
    expect(index.need(2).pinned == 0 && index.need(2).pinned_bytes == 0, "nothing is pinned");
    bool refused = false;
    try {
        for (std::uint8_t i = 0;; ++i) index.add(bytes(std::string(kv::kKeyBytes, static_cast<char>(i))), kv::kNone, 1, 0);
    } catch (const std::bad_alloc&) {
        refused = true;
    }
    expect(refused && index.count() == 64, "a full index takes no more and stays as it is");
}

}  // namespace

int check_index() {
    for (const std::uint32_t seed : {1u, 2u}) {
        check_names(seed);
        check_lists(seed);
    }
    check_pins();
    return wrong;
}
