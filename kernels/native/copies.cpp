// No form is the best everywhere: lanes a page apart were ahead of plain stores with AVX-512 and a tenth of them on
// Zen 3. So each process times them once, as they will be used: small copies in the caches, large ones from memory
// to memory, lines of neither side in a cache.
#include "copies.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#include <sys/mman.h>

#include "crc.h"
#include "levels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLine = 64;
constexpr std::size_t kSmallProbe = std::size_t{32} << 10;   // bytes copied to time a small copy
constexpr std::size_t kLargeProbe = std::size_t{512} << 10;
constexpr std::size_t kProbeMemory = 12 * 2 * kLargeProbe;   // 3072 pages
constexpr int kRounds = 7;                                   // of which the best counts: other work only adds time
constexpr double kSecondsMax = 0.010;                        // no further round after this, but two there are
// A copy through the caches leaves its writing back to whoever needs the lines next, which this does not time: up to
// 1.36 times too fast beside a streamed one (AVX-512, a probe beside 16 MiB). With this favour whatever is taken is at
// least 0.8 of the best, on either side.
constexpr double kStreamFavour = 1.25;

std::uint32_t sum_plain(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t state) {
    constexpr std::size_t kFold = 3 * kNearLane;  // summed while it is in L1
    for (std::size_t done = 0; done < size; done += kFold) {
        const std::size_t count = std::min(size - done, kFold);
        std::memcpy(to + done, from + done, count);
        // The copy is summed, not its source: another process may write to the source meanwhile.
        state = crc_state(to + done, count, state);
    }
    return state;
}

void copy_plain(std::uint8_t* to, const std::uint8_t* from, std::size_t size) { std::memcpy(to, from, size); }

const CopyForm kPlain = {"plain", false, sum_plain, copy_plain};

#if defined(__x86_64__)
__attribute__((target("clflushopt"))) void flush_fast(const std::uint8_t* data, std::size_t size) {
    for (std::size_t i = 0; i < size; i += kLine) _mm_clflushopt(const_cast<std::uint8_t*>(data + i));
    _mm_mfence();
}

bool has_fast_flush() {
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return b >> 23 & 1u;
}
#endif

// Take the lines of a buffer out of all caches, where the processor can do so quickly.
void flush(const std::uint8_t* data, std::size_t size) {
#if defined(__x86_64__)
    static const bool fast = has_fast_flush();
    if (fast) return flush_fast(data, size);
    for (std::size_t i = 0; i < size; i += kLine) _mm_clflush(data + i);
    _mm_mfence();
#else
    (void)data, (void)size;
#endif
}

// Shared memory, as HOST is, and of so many pages that the processor has forgotten where one lies when its turn comes
// again: the forms differ in how well they hide that, too.
class Probe {
public:
    Probe() : memory_(mmap(nullptr, kProbeMemory, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0)) {
        if (memory_ == MAP_FAILED) throw std::bad_alloc();
    }
    ~Probe() { munmap(memory_, kProbeMemory); }
    Probe(const Probe&) = delete;
    Probe& operator=(const Probe&) = delete;

    double seconds(const CopyForm& form, bool large, bool summed) {
        std::uint8_t *const source = static_cast<std::uint8_t*>(memory_) + (large ? at_ : 0), *const target = source + kLargeProbe;
        const std::size_t size = large ? kLargeProbe : kSmallProbe;
        if (large) {
            flush(source, 2 * kLargeProbe);
            at_ = (at_ + 2 * kLargeProbe) % kProbeMemory;
        } else {
            run(form, target, source, size, summed);  // brings both sides into the caches
        }
        const auto begin = Clock::now();
        run(form, target, source, size, summed);
        return std::chrono::duration<double>(Clock::now() - begin).count();
    }

private:
    void run(const CopyForm& form, std::uint8_t* target, const std::uint8_t* source, std::size_t size, bool summed) {
        if (summed)
            state_ = form.sum(target, source, size, state_);
        else
            form.copy(target, source, size);
    }

    void* memory_;
    std::size_t at_ = 0;
    std::uint32_t state_ = 0;
};

struct Candidate {
    const CopyForm* form;
    bool large, summed;
    double best = 1e9;
};

CopyChoice choose(const std::vector<Candidate>& candidates, bool large, bool summed) {
    CopyChoice choice{nullptr, {}};
    double fastest = 0;
    for (const Candidate& one : candidates) {
        if (one.large != large || one.summed != summed) continue;
        const double speed = static_cast<double>(large ? kLargeProbe : kSmallProbe) / one.best;
        choice.speeds.push_back({one.form, speed});
        const double worth = large && one.form->streams ? speed * kStreamFavour : speed;
        if (worth > fastest) {
            fastest = worth;
            choice.form = one.form;
        }
    }
    return choice;
}

CopyChoices measure(const Level& level) {
    const auto begin = Clock::now();
    const auto elapsed = [begin] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
    std::vector<Candidate> candidates;
    for (const CopyForm* form : copy_forms(level))
        for (const bool large : {false, true})
            for (const bool summed : {false, true})
                if ((summed ? form->sum != nullptr : form->copy != nullptr) && (large || !form->streams))
                    candidates.push_back({form, large, summed});
    Probe probe;
    for (int round = 0; round < kRounds && (round < 2 || elapsed() < kSecondsMax); ++round)
        for (Candidate& one : candidates) one.best = std::min(one.best, probe.seconds(*one.form, one.large, one.summed));
    return {choose(candidates, false, false), choose(candidates, false, true), choose(candidates, true, false),
            choose(candidates, true, true), elapsed()};
}

}  // namespace

std::vector<const CopyForm*> copy_forms(const Level& level) {
    std::vector<const CopyForm*> forms{&kPlain};
    for (int i = 0; i < level.copy_count; ++i) forms.push_back(level.copies + i);
    return forms;
}

const CopyChoices& copy_choices(const Level& level) {
    static std::mutex mutex;
    static std::map<const Level*, CopyChoices> made;
    const std::lock_guard lock(mutex);
    const auto found = made.find(&level);
    return found != made.end() ? found->second : made.emplace(&level, measure(level)).first->second;
}

const CopyForm& chosen_copy(bool summed, std::size_t total) {
    static const CopyChoices& here = copy_choices(best_level());
    if (total < kLargeCopy) return summed ? *here.small_summed.form : *here.small_plain.form;
    return summed ? *here.large_summed.form : *here.large_plain.form;
}

}  // namespace kv
