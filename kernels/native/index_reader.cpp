#include "index_reader.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <bit>
#include <cstring>
#include <stdexcept>

namespace kv {

namespace {

constexpr std::size_t kAhead = 32;   // keys that are looked up in one step, and whose memory is asked for together
constexpr int kAttempts = 8;         // looks at one step of keys
constexpr std::size_t kProbes = 4096;  // entries of a table that one key may take: a run of so many is none of the index's

void* mapped(int fd, std::size_t bytes) {
    void* const at = mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED) throw std::invalid_argument("the index can not be mapped");
    return at;
}

IndexShape shape_of(int fd) {
    struct stat status{};
    if (fstat(fd, &status) != 0 || static_cast<std::size_t>(status.st_size) < sizeof(IndexHeader)) throw std::invalid_argument("no index");
    void* const head = mapped(fd, sizeof(IndexHeader));
    const IndexHeader& header = *static_cast<const IndexHeader*>(head);
    const std::uint64_t magic = header.magic, slots = header.slots, names = header.names;
    munmap(head, sizeof(IndexHeader));
    constexpr std::uint64_t kMost = std::uint64_t{1} << 30;
    if (magic != kIndexMagic || slots > kMost || names > kMost) throw std::invalid_argument("an index of another layout");
    const IndexShape shape(slots, names);
    if (shape.bytes != static_cast<std::size_t>(status.st_size)) throw std::invalid_argument("an index of another size than it says");
    return shape;
}

}  // namespace

MappedIndex::MappedIndex(int fd) : shape_(shape_of(fd)), base_(mapped(fd, shape_.bytes)), reader_(base_, shape_) {}

MappedIndex::~MappedIndex() { munmap(base_, shape_.bytes); }

IndexReader::Table IndexReader::table_of(std::uint64_t entries) const {
    if (!std::has_single_bit(entries) || entries > shape_.entries_max) return {nullptr, 0};
    return {at<std::uint64_t>(shape_.table) + entries, entries - 1};
}

bool IndexReader::is(std::size_t offset, const std::uint8_t* bytes) const {
    std::uint64_t words[kKeyWords];
    std::memcpy(words, bytes, sizeof words);
    for (std::size_t i = 0; i < kKeyWords; ++i)
        if (published(at<std::uint64_t>(offset)[i]) != words[i]) return false;
    return true;
}

std::uint8_t IndexReader::residency_of(std::uint32_t tag, std::uint32_t space, const std::uint8_t* key) const {
    for (const std::uint64_t entries : {published(header().now), published(header().old)}) {
        const Table table = table_of(entries);
        if (table.entries == nullptr) continue;
        for (std::size_t probe = 0, at_entry = tag & table.mask; probe < kProbes; ++probe, at_entry = (at_entry + 1) & table.mask) {
            const Entry entry = Entry::of(published(table.entries[at_entry]));
            if (entry.place == 0) break;
            const std::size_t slot = std::size_t{entry.place} - 1;
            if (entry.tag != tag || slot >= shape_.slots) continue;
            if (published(at<std::uint32_t>(shape_.spaces)[slot]) != space || !is(shape_.keys + slot * kKeyBytes, key)) continue;
            return published(at<std::uint8_t>(shape_.residency)[slot]);
        }
    }
    return 0;
}

std::size_t IndexReader::run(std::uint32_t space, const std::uint8_t* const* keys, std::size_t count, char* found) const {
    const auto readable = static_cast<std::uint8_t>(published(header().readable));
    const Table table = table_of(published(header().now));
    if (readable == 0 || table.entries == nullptr) return 0;
    std::uint32_t tags[kAhead];
    for (std::size_t i = 0; i < count; ++i) {
        tags[i] = tag_of(header().seeds, space, keys[i]);
        __builtin_prefetch(&table.entries[tags[i] & table.mask]);
    }
    for (std::size_t i = 0; i < count; ++i) {
        const Entry entry = Entry::of(published(table.entries[tags[i] & table.mask]));
        const std::size_t slot = std::size_t{entry.place} - 1;
        if (entry.tag != tags[i] || slot >= shape_.slots) continue;
        __builtin_prefetch(at<std::uint8_t>(shape_.keys + slot * kKeyBytes));
        __builtin_prefetch(&at<std::uint32_t>(shape_.spaces)[slot]);
        __builtin_prefetch(&at<std::uint8_t>(shape_.residency)[slot]);
    }
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint8_t bits = residency_of(tags[i], space, keys[i]) & readable;
        if (bits == 0) return i;
        found[i] = static_cast<char>(bits);
    }
    return count;
}

std::size_t IndexReader::match(std::uint32_t space, const std::uint8_t* name, const std::uint8_t* const* keys, std::size_t count, char* found) const {
    if (space >= shape_.names) return 0;
    for (std::size_t begin = 0; begin < count; begin += kAhead) {
        const std::size_t some = count - begin < kAhead ? count - begin : kAhead;
        for (int attempt = 0;; ++attempt) {
            if (attempt == kAttempts) return begin;
            const std::uint64_t before = published(header().changes);
            if (before & 1) continue;
            const bool known = is(shape_.name + space * kKeyBytes, name);
            const std::size_t matched = known ? run(space, keys + begin, some, found + begin) : 0;
            if (published(header().changes) != before) continue;
            if (matched < some) return begin + matched;
            break;
        }
    }
    return count;
}

}  // namespace kv
