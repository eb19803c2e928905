#include "index.h"

#include <cstring>
#include <stdexcept>

namespace kv {

namespace {

constexpr std::size_t kFirstEntries = 1 << 10;
constexpr std::size_t kMovedAtOnce = 8;  // entries of the old table: it is empty before the new one is full
constexpr std::uint32_t kDepthMax = 0xFFFF, kHitsMax = 0xFFFF;
constexpr std::size_t kAhead = 32;  // keys whose memory is asked for together

void publish_key(Key& key, const std::uint8_t* bytes) {
    std::uint64_t words[kKeyWords];
    std::memcpy(words, bytes, sizeof words);
    for (std::size_t i = 0; i < kKeyWords; ++i) publish(key.words[i], words[i]);
}

std::uint16_t depth_of(std::uint32_t depth) { return static_cast<std::uint16_t>(depth < kDepthMax ? depth : kDepthMax); }

}  // namespace

// ---------------------------------------------------------------- the table

SlotTable::Table SlotTable::make(std::size_t capacity) const {
    if (capacity > memory_.shape.entries_max) throw std::bad_alloc();
    return {memory_.table(capacity), static_cast<std::uint32_t>(capacity - 1)};
}

void SlotTable::tell() const {
    publish(memory_.header().now, std::uint64_t{now_.capacity()});
    publish(memory_.header().old, std::uint64_t{old_.capacity()});
}

SlotTable::SlotTable(IndexMemory& memory) : memory_(memory), now_(make(kFirstEntries)) { tell(); }

std::int32_t SlotTable::find(std::uint32_t tag, std::uint32_t space, const std::uint8_t* key,
                             const Column<std::uint32_t>& spaces, const Column<Key>& keys) const {
    for (const Table* table : {&now_, &old_}) {
        if (table->entries == nullptr) break;
        for (std::uint32_t at = tag & table->mask;; at = (at + 1) & table->mask) {
            const Entry entry = (*table)[at];
            if (entry.place == 0) break;
            if (entry.tag != tag || entry.place == kMoved) continue;
            const std::uint32_t slot = entry.place - 1;
            if (spaces[slot] == space && std::memcmp(keys[slot].bytes, key, kKeyBytes) == 0) return static_cast<std::int32_t>(slot);
        }
    }
    return kNone;
}

std::int32_t SlotTable::likely(std::uint32_t tag) const {
    for (std::uint32_t at = tag & now_.mask;; at = (at + 1) & now_.mask) {
        const Entry entry = now_[at];
        if (entry.place == 0) return kNone;
        if (entry.tag == tag) return static_cast<std::int32_t>(entry.place - 1);
    }
}

void SlotTable::Table::add(Entry entry) {
    std::uint32_t at = entry.tag & mask;
    while ((*this)[at].place != 0) at = (at + 1) & mask;
    put(at, entry);
}

void SlotTable::move_some() {
    for (std::size_t step = 0; step < kMovedAtOnce && old_.entries != nullptr; ++step) {
        const auto at = static_cast<std::uint32_t>(moved_);
        const Entry entry = old_[at];
        if (entry.place != 0 && entry.place != kMoved) {
            now_.add(entry);
            old_.put(at, {entry.tag, kMoved});
        }
        if (++moved_ < old_.capacity()) continue;
        const std::size_t gone = old_.capacity();
        old_ = Table{};
        tell();
        memory_.forget_table(gone);
    }
}

void SlotTable::insert(std::uint32_t tag, std::int32_t slot) {
    if (old_.entries != nullptr) {
        move_some();
    } else if ((count_ + 1) * 4 > now_.capacity() * 3) {
        const Table larger = make(2 * now_.capacity());
        old_ = now_;
        now_ = larger;
        moved_ = 0;
        tell();
    }
    now_.add({tag, static_cast<std::uint32_t>(slot) + 1});
    ++count_;
}

void SlotTable::erase(std::uint32_t tag, std::int32_t slot) {
    const std::uint32_t place = static_cast<std::uint32_t>(slot) + 1;
    --count_;
    if (old_.entries != nullptr)
        for (std::uint32_t at = tag & old_.mask; old_[at].place != 0; at = (at + 1) & old_.mask)
            if (old_[at].place == place) {
                old_.put(at, {tag, kMoved});
                return;
            }
    std::uint32_t hole = tag & now_.mask;
    while (now_[hole].place != place) {
        if (now_[hole].place == 0) throw std::logic_error("the slot is not in the table");
        hole = (hole + 1) & now_.mask;
    }
    // Those behind it come forward, unless that would put them before where they are looked for.
    for (std::uint32_t at = (hole + 1) & now_.mask; now_[at].place != 0; at = (at + 1) & now_.mask) {
        const std::uint32_t home = now_[at].tag & now_.mask;
        if (((at - home) & now_.mask) < ((at - hole) & now_.mask)) continue;
        now_.put(hole, now_[at]);
        hole = at;
    }
    now_.put(hole, {0, 0});
}

// ---------------------------------------------------------------- slots

Index::Index(const std::vector<int>& tiers, std::size_t count, bool shared)
    : memory_(count, kNamesMax, shared), keys(memory_.at<Key>(memory_.shape.keys), count), parent(count), children(count),
      spaces(memory_.at<std::uint32_t>(memory_.shape.spaces), count), last_use(count),
      residency(memory_.at<std::uint8_t>(memory_.shape.residency), count), codec(count), depth(count), hits(count), table_(memory_) {
    for (const int number : tiers) {
        if (number < 1 || number > kIndexTiers) throw std::invalid_argument("a tier's number is 1 to 8");
        if (tiers_[number]) continue;
        tiers_[number] = std::make_unique<TierColumns>(count);
        numbers_.push_back(number);
    }
}

void Index::name(std::uint32_t space, const std::uint8_t* name) {
    if (space >= memory_.shape.names) return;
    static const Key none{};
    const Change change(memory_.header());
    publish_key(memory_.at<Key>(memory_.shape.name)[space], name != nullptr ? name : none.bytes);
}

std::int32_t Index::find(std::uint32_t space, const std::uint8_t* key) const {
    return table_.find(tag_of(space, key), space, key, spaces, keys);
}

void Index::find_all(std::uint32_t space, const std::uint8_t* const* wanted, std::size_t count, std::int32_t* slots) const {
    std::uint32_t tags[kAhead];
    for (std::size_t begin = 0; begin < count; begin += kAhead) {
        const std::size_t some = count - begin < kAhead ? count - begin : kAhead;
        for (std::size_t i = 0; i < some; ++i) {
            tags[i] = tag_of(space, wanted[begin + i]);
            table_.prefetch(tags[i]);
        }
        for (std::size_t i = 0; i < some; ++i) {
            const std::int32_t slot = table_.likely(tags[i]);
            if (slot < 0) continue;
            __builtin_prefetch(&keys[slot]);
            __builtin_prefetch(&spaces[slot]);
            __builtin_prefetch(&residency[slot]);
        }
        for (std::size_t i = 0; i < some; ++i)
            slots[begin + i] = table_.find(tags[i], space, wanted[begin + i], spaces, keys);
    }
}

std::int32_t Index::add(const std::uint8_t* key, std::int32_t above, std::uint32_t space, std::uint32_t deep) {
    if (free_.empty() && static_cast<std::size_t>(fresh_) == keys.size()) throw std::bad_alloc();
    const std::int32_t slot = free_.empty() ? fresh_ : free_.back();
    const Change change(memory_.header());
    table_.insert(tag_of(space, key), slot);
    if (free_.empty()) {
        for (const int number : numbers_) tiers_[number]->colder[slot] = tiers_[number]->hotter[slot] = kUnlisted;
        ++fresh_;
    } else {
        free_.pop_back();
    }
    publish_key(keys[slot], key);
    parent[slot] = above;
    publish(spaces[slot], space);
    depth[slot] = depth_of(deep);
    if (above >= 0) ++children[above];
    return slot;
}

void Index::adopt(std::int32_t slot, std::int32_t above, std::uint32_t deep) {
    parent[slot] = above;
    depth[slot] = depth_of(deep);
    if (above >= 0) ++children[above];
}

void Index::orphan(std::int32_t slot) {
    if (parent[slot] >= 0) --children[parent[slot]];
    parent[slot] = kUnknown;
}

void Index::remove(std::int32_t slot) {
    if (!in_use(slot)) throw std::out_of_range("the slot is free");
    const Change change(memory_.header());
    table_.erase(tag_of(spaces[slot], keys[slot].bytes), slot);
    if (parent[slot] >= 0) --children[parent[slot]];
    publish(spaces[slot], kFree);
    codec[slot] = 0;
    hits[slot] = 0;
    free_.push_back(slot);
}

Entered Index::enter(std::uint32_t space, int number, const std::vector<Recovered>& blocks) {
    static const Key root{};
    TierColumns& tier = need(number);
    const auto bit = static_cast<std::uint8_t>(1 << (number - 1));
    const std::size_t before = count();
    Entered done;
    std::int32_t last = kNone;  // the block before: most are its children
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        const Recovered& block = blocks[i];
        std::int32_t slot = find(space, block.key);
        if (slot != kNone && (residency[slot] & bit || (residency[slot] != 0 && codec[slot] != block.kind))) {
            done.refused.push_back(i);
            continue;
        }
        std::int32_t above = kNone;
        if (std::memcmp(block.parent, root.bytes, kKeyBytes) != 0) {
            above = last != kNone && std::memcmp(block.parent, keys[last].bytes, kKeyBytes) == 0 ? last : find(space, block.parent);
            if (above == kNone) {
                above = add(block.parent, kUnknown, space, 0);
                slot = find(space, block.key);  // which may be the block itself
            }
        }
        const std::uint32_t deep = above >= 0 ? depth[above] + 1u : 0;
        if (slot == kNone) slot = add(block.key, above, space, deep);
        else if (parent[slot] == kUnknown) adopt(slot, above, deep);
        codec[slot] = block.kind;
        tier.place[slot] = block.place;
        done.fresh += residency[slot] == 0;
        publish(residency[slot], static_cast<std::uint8_t>(residency[slot] | bit));
        if (parent[slot] >= 0) ++tier.kids[parent[slot]];
        ++done.kinds[block.kind & (kKinds - 1)];
        if (tier.lists) use(number, slot);
        else done.slots.push_back(slot);
        last = slot;
    }
    done.added = count() - before;
    return done;
}

// ---------------------------------------------------------------- uses and pins

void Index::note(const std::int32_t* slots, std::size_t count, std::uint32_t ticks) {
    for (std::size_t i = 0; i < count; ++i) {
        last_use[slots[i]] = ticks;
        if (hits[slots[i]] < kHitsMax) ++hits[slots[i]];
    }
    for (const int number : numbers_) {
        if (!tiers_[number]->lists) continue;
        for (std::size_t i = count; i-- > 0;) use_if_known(number, slots[i]);
    }
}

void Index::know(std::uint32_t space, const std::vector<std::int64_t>& sizes) {
    constexpr std::size_t kEach = (kIndexTiers + 1) * kKinds;
    if (sizes.size() != kEach) throw std::invalid_argument("sizes are 4 for each of 9 tiers");
    if (sizes_.size() < (std::size_t{space} + 1) * kEach) sizes_.resize((std::size_t{space} + 1) * kEach);
    std::memcpy(&sizes_[space * kEach], sizes.data(), kEach * sizeof(std::int64_t));
}

std::int64_t Index::size_of(std::int32_t slot, int tier) const {
    const std::size_t at = (std::size_t{spaces[slot]} * (kIndexTiers + 1) + tier) * kKinds + (codec[slot] & (kKinds - 1));
    return at < sizes_.size() ? sizes_[at] : 0;
}

void Index::set_kind(std::int32_t slot, std::uint8_t kind) {
    for (const int number : numbers_)
        if (tiers_[number]->pins[slot] != 0) tiers_[number]->pinned_bytes -= size_of(slot, number);
    codec[slot] = kind;
    for (const int number : numbers_)
        if (tiers_[number]->pins[slot] != 0) tiers_[number]->pinned_bytes += size_of(slot, number);
}

bool Index::pin(std::int32_t slot, int number) {
    TierColumns& tier = need(number);
    if (tier.pins[slot]++ != 0) return false;
    ++tier.pinned;
    tier.pinned_bytes += size_of(slot, number);
    if (tier.lists) take(number, slot);
    return true;
}

bool Index::unpin(std::int32_t slot, int number) {
    TierColumns& tier = need(number);
    if (tier.pins[slot] == 0) throw std::out_of_range("the copy is not pinned");
    if (--tier.pins[slot] != 0) return false;
    --tier.pinned;
    tier.pinned_bytes -= size_of(slot, number);
    if (tier.lists && residency[slot] >> (number - 1) & 1) use(number, slot);
    return true;
}

TierColumns& Index::need(int number) const {
    TierColumns* const found = tier(number);
    if (found == nullptr) throw std::out_of_range("this index has no such tier");
    return *found;
}

// ---------------------------------------------------------------- lists

void Index::use(int number, std::int32_t slot) {
    TierColumns& tier = need(number);
    if (tier.listed.hot == slot) return;
    take(number, slot);
    const std::int32_t hot = tier.listed.hot;
    tier.colder[slot] = hot;
    tier.hotter[slot] = kNone;
    (hot == kNone ? tier.listed.cold : tier.hotter[hot]) = slot;
    tier.listed.hot = slot;
}

void Index::use_if_known(int number, std::int32_t slot) {
    if (need(number).hotter[slot] != kUnlisted) use(number, slot);
}

void Index::take(int number, std::int32_t slot) {
    TierColumns& tier = need(number);
    const std::int32_t hotter = tier.hotter[slot], colder = tier.colder[slot];
    if (hotter == kUnlisted) return;
    Ends& ends = tier.aside[slot] ? tier.set_aside : tier.listed;
    (colder == kNone ? ends.cold : tier.hotter[colder]) = hotter;
    (hotter == kNone ? ends.hot : tier.colder[hotter]) = colder;
    tier.colder[slot] = tier.hotter[slot] = kUnlisted;
    tier.aside[slot] = 0;
}

void Index::set_aside(int number, std::int32_t slot) {
    TierColumns& tier = need(number);
    take(number, slot);
    const std::int32_t last = tier.set_aside.hot;
    tier.colder[slot] = last;
    tier.hotter[slot] = kNone;
    (last == kNone ? tier.set_aside.cold : tier.hotter[last]) = slot;
    tier.set_aside.hot = slot;
    tier.aside[slot] = 1;
}

void Index::return_cold(int number, std::int32_t slot) {
    TierColumns& tier = need(number);
    if (!tier.aside[slot]) return;
    take(number, slot);
    const std::int32_t cold = tier.listed.cold;
    tier.hotter[slot] = cold;
    tier.colder[slot] = kNone;
    (cold == kNone ? tier.listed.hot : tier.colder[cold]) = slot;
    tier.listed.cold = slot;
}

void Index::reconsider_all(int number) {
    TierColumns& tier = need(number);
    while (tier.set_aside.hot != kNone) return_cold(number, tier.set_aside.hot);
}

}  // namespace kv
