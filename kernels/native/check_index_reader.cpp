// Readers of an index that changes under them, with the sanitizers looking on; see check_main.cpp. They read the memory
// where the writer has it, so that the thread sanitizer sees both.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "index.h"
#include "index_reader.h"

namespace {

constexpr std::uint32_t kSpaces = 2, kKeys = 6000, kAlways = 200;

int wrong = 0;

void expect(bool ok, const char* what) {
    if (ok) return;
    ++wrong;
    std::printf("FAILED: %s\n", what);
}

std::string text(std::uint32_t number, char filler) {
    std::string key(kv::kKeyBytes, filler);
    std::memcpy(key.data() + 8, &number, sizeof number);
    return key;
}

const std::uint8_t* bytes(const std::string& key) { return reinterpret_cast<const std::uint8_t*>(key.data()); }

// What a block of this key has for residency in this namespace, whenever it is there: whoever reads another one read
// another block's.
std::uint8_t bits_of(std::uint32_t space, std::uint32_t number) { return static_cast<std::uint8_t>(1 + (space * 3 + number) % 7); }

// Keys below kAlways are in the index all the time, those from kKeys on never; the others come and go.
void read(const kv::IndexReader& reader, const std::vector<std::string>& names, const std::atomic<bool>& done, std::uint32_t seed, std::atomic<int>& bad) {
    std::mt19937 random(seed);
    std::vector<std::string> keys;
    for (std::uint32_t i = 0; i < 2 * kKeys; ++i) keys.push_back(text(i, 'k'));
    char found[64];
    while (!done) {
        const std::uint32_t space = random() % kSpaces, from = random() % (2 * kKeys - 64);
        const std::uint32_t first = random() % 2 ? from : random() % (kAlways - 64);
        std::vector<const std::uint8_t*> wanted;
        for (std::uint32_t i = 0; i < 64; ++i) wanted.push_back(bytes(keys[first + i]));
        const std::size_t count = reader.match(space, bytes(names[space]), wanted.data(), wanted.size(), found);
        for (std::size_t i = 0; i < count; ++i)
            if (first + i >= kKeys || static_cast<std::uint8_t>(found[i]) != bits_of(space, first + static_cast<std::uint32_t>(i))) ++bad;
        if (reader.match(space, bytes(names[1 - space]), wanted.data(), wanted.size(), found) != 0) ++bad;
    }
}

void check_torture() {
    kv::Index index({2, 3}, 1 << 15, true);
    std::vector<std::string> names;
    for (std::uint32_t space = 0; space < kSpaces; ++space) {
        names.push_back(text(space, 'n'));
        index.name(space, bytes(names[space]));
    }
    index.set_readable(7);
    std::vector<std::int32_t> slots(kSpaces * kKeys, kv::kNone);
    const auto come = [&](std::uint32_t space, std::uint32_t number) {
        std::int32_t& slot = slots[space * kKeys + number];
        slot = index.add(bytes(text(number, 'k')), kv::kNone, space, 0);
        kv::publish(index.residency[slot], bits_of(space, number));
    };
    const auto go = [&](std::uint32_t space, std::uint32_t number) {
        std::int32_t& slot = slots[space * kKeys + number];
        kv::publish(index.residency[slot], std::uint8_t{0});
        index.remove(slot);
        slot = kv::kNone;
    };
    for (std::uint32_t space = 0; space < kSpaces; ++space)
        for (std::uint32_t i = 0; i < kAlways; ++i) come(space, i);
    const kv::IndexReader reader(&index.memory().header(), index.memory().shape);
    std::atomic<bool> done = false;
    std::atomic<int> bad = 0;
    std::vector<std::thread> readers;
    for (std::uint32_t seed = 0; seed < 3; ++seed) readers.emplace_back([&, seed] { read(reader, names, done, seed, bad); });
    std::mt19937 random(9);
    for (int step = 0; step < 60000; ++step) {
        const std::uint32_t space = random() % kSpaces, number = kAlways + random() % (kKeys - kAlways);
        if (slots[space * kKeys + number] == kv::kNone) come(space, number);
        else if (random() % 2) go(space, number);
    }
    done = true;
    for (std::thread& thread : readers) thread.join();
    expect(bad == 0, "a reader finds no block that is not there, nor another one's residency");
    const std::string first = text(0, 'k');
    const std::uint8_t* const key = bytes(first);
    char found = 0;
    expect(reader.match(0, bytes(names[0]), &key, 1, &found) == 1 && found == 1, "a block is found when nothing changes");
    const kv::MappedIndex mapped(index.memory().fd());
    expect(mapped.reader().match(1, bytes(names[1]), &key, 1, &found) == 1 && found == 4, "so it is where another one maps it");
    index.name(1, nullptr);
    expect(mapped.reader().match(1, bytes(names[1]), &key, 1, &found) == 0, "a namespace that was forgotten has none");
    index.set_readable(2);
    expect(mapped.reader().match(0, bytes(names[0]), &key, 1, &found) == 0, "what can not be read is not there");
    expect(mapped.reader().match(0xFFFFFFFF, bytes(names[0]), &key, 1, &found) == 0, "a number beyond all is no namespace");
}

// One slot that is two keys' in turn: without the sequence lock a reader takes the residency of one for the other's.
void check_one_slot() {
    kv::Index index({2}, 64, true);
    const std::string name = text(0, 'n'), keys[2] = {text(1, 'k'), text(2, 'k')};
    index.name(0, bytes(name));
    index.set_readable(7);
    const kv::IndexReader reader(&index.memory().header(), index.memory().shape);
    std::atomic<bool> done = false;
    std::atomic<int> bad = 0, seen = 0;
    std::vector<std::thread> readers;
    for (int which = 0; which < 2; ++which)
        readers.emplace_back([&, which] {
            const std::uint8_t* const wanted = bytes(keys[which]);
            char found = 0;
            while (!done) {
                if (reader.match(0, bytes(name), &wanted, 1, &found) == 0) continue;
                if (found != which + 1) ++bad;
                ++seen;
            }
        });
    for (int step = 0; step < 400000 || seen < 1000; ++step) {
        const std::int32_t slot = index.add(bytes(keys[step % 2]), kv::kNone, 0, 0);
        kv::publish(index.residency[slot], static_cast<std::uint8_t>(step % 2 + 1));
        kv::publish(index.residency[slot], std::uint8_t{0});
        index.remove(slot);
    }
    done = true;
    for (std::thread& thread : readers) thread.join();
    expect(bad == 0, "a slot that is another block's by now is not taken for this one's");
}

void check_refusals() {
    bool refused = false;
    kv::IndexMemory other(64, 1, true);
    other.header().slots = 65;
    other.header().magic = kv::kIndexMagic + 1;
    try {
        const kv::MappedIndex mapped(other.fd());
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    expect(refused, "another layout is refused");
    other.header().magic = kv::kIndexMagic;
    other.header().slots = 1 << 20;
    refused = false;
    try {
        const kv::MappedIndex mapped(other.fd());
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    expect(refused, "a size that is not the memory's is refused");
    // Whatever stands there, a reader stays within its bounds and comes to an end.
    other.header().slots = 64;
    const kv::MappedIndex mapped(other.fd());
    std::mt19937 random(3);
    const std::string key = text(1, 'k'), name = text(0, 'n');
    const std::uint8_t* const wanted = bytes(key);
    char found = 0;
    for (int round = 0; round < 200; ++round) {
        other.header().now = std::uint64_t{1} << random() % 64;
        other.header().old = random();
        other.header().readable = 7;
        other.header().changes = random() % 4;
        for (std::size_t i = 0; i < 2 * other.shape.entries_max; ++i) other.table(0)[i] = (std::uint64_t{random()} << 32) | kv::tag_of(other.header().seeds, 0, wanted);
        mapped.reader().match(0, bytes(name), &wanted, 1, &found);
    }
}

}  // namespace

int check_index_reader() {
    check_torture();
    check_one_slot();
    check_refusals();
    return wrong;
}
