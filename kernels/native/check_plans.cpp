// Reading plans under the sanitizers: passes, drops, moves and ends from several threads at once. Run by check_main.cpp.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "lz4.h"
#include "memory.h"
#include "plans.h"

namespace {

constexpr std::size_t kUnit = 3000, kBlocks = 200, kLayers = 3, kSlot = 16384;

void require(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "reading plans: %s\n", what);
    std::exit(1);
}

struct File {
    std::vector<std::uint8_t> data;
    int fd = -1;

    File() : data((kBlocks * kLayers * kUnit + 4095) / 4096 * 4096) {
        for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::uint8_t>(i * 2654435761u >> 13);
        char name[] = "/tmp/kv-plans-XXXXXX";
        fd = mkstemp(name);
        unlink(name);
        require(fd >= 0 && write(fd, data.data(), data.size()) == static_cast<ssize_t>(data.size()), "no file");
    }
    ~File() { close(fd); }
};

// A read may end behind its plan and look at this still.
std::atomic<std::uint64_t> version{0};

struct Reader {
    kv::PlanEngine& engine;
    const File& file;
    std::unique_ptr<std::uint8_t[]> ring{new (std::align_val_t{4096}) std::uint8_t[kv::kPlanControlBytes + 3 * kSlot]()};
    std::uint64_t plan = 0;
    std::uint32_t taken = 0;
    int bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

    Reader(kv::PlanEngine& with, const File& of, std::uint64_t owner) : engine(with), file(of) {
        kv::PlanKind kind{{0, 1, 2, 3}, std::vector<std::uint32_t>(kLayers, kUnit), {0, 0, 0}, kUnit, kUnit};
        plan = engine.open(owner, {ring.get(), 3, kSlot}, {kind});
        engine.add_blocks(plan, kBlocks);
        engine.add_bell(bell);
        locate();
    }
    ~Reader() {
        engine.close(plan, 0);
        engine.remove_bell(bell);
        close(bell);
        ::operator delete[](ring.release(), std::align_val_t{4096});
    }

    void locate() {
        std::vector<std::uint64_t> offsets;
        std::vector<std::uint32_t> lengths, crcs;
        kv::PlanColumns columns{};
        for (std::uint32_t block = 0; block < kBlocks; ++block) {
            columns.blocks.push_back(block);
            for (std::size_t layer = 0; layer < kLayers; ++layer) {
                const std::size_t at = (layer * kBlocks + block) * kUnit;
                offsets.push_back(at);
                lengths.push_back(kUnit);
                crcs.push_back(kv::crc32c(file.data.data() + at, kUnit, 0));
            }
        }
        columns.files.push_back({file.fd, &version, version.load()});
        columns.file.assign(kBlocks, 0);
        columns.planes.assign(kBlocks, 0);
        columns.offsets = offsets.data();
        columns.lengths = lengths.data();
        columns.crcs = crcs.data();
        engine.set_blocks(plan, columns, kLayers);
    }

    void read(std::uint64_t pieces) {
        auto& control = *reinterpret_cast<kv::PlanControl*>(ring.get());
        for (std::uint64_t i = 0; i < pieces; ++i) {
            const kv::PlanSeen seen = kv::plan_wait(control, taken + 1, 20.0);
            require(static_cast<std::int32_t>(seen.landed - taken) > 0, "a piece does not land");
            const auto& piece = reinterpret_cast<const kv::PlanPiece*>(ring.get() + 64)[taken % 3];
            const std::uint8_t* const slot = ring.get() + kv::kPlanControlBytes + (taken % 3) * kSlot;
            const std::uint8_t* const wanted = file.data.data() + (piece.layer * kBlocks + piece.first) * kUnit;
            for (std::size_t at = 0; at < piece.count * kUnit; ++at) require(slot[at] == wanted[at], "wrong bytes");
            kv::plan_done(control, ++taken, bell);
        }
    }
};

}  // namespace

int check_plans() {
    const File file;
    for (const bool rest : {false, true}) {
        kv::PlanEngine engine(3, 0);
        std::atomic<bool> over{false};
        std::thread keeper([&] {
            while (!over)
                for (const kv::PlanEvent& event : engine.events(0.01)) {
                    try {
                        if (event.kind == kv::PlanEventKind::trouble) engine.retry(event.plan);
                    } catch (const std::out_of_range&) {
                        continue;  // its reader closed it
                    }
                }
        });
        std::vector<std::thread> readers;
        for (std::uint64_t owner = 0; owner < 3; ++owner)
            readers.emplace_back([&engine, &file, owner, rest] {
                for (int turn = 0; turn < 8; ++turn) {
                    Reader reader(engine, file, owner);
                    const std::uint64_t pieces = engine.begin(reader.plan, 0, kLayers, nullptr).pieces;
                    for (std::uint64_t i = 0; i < pieces; ++i) {
                        reader.read(1);
                        engine.stale_blocks(reader.plan);
                        if (i % 4 == 0) reader.locate();
                    }
                    engine.begin(reader.plan, 0, kLayers, nullptr);
                    if (rest) engine.drop(reader.plan);
                }
            });
        for (std::thread& reader : readers) reader.join();
        over = true;
        keeper.join();
        engine.stop(20.0);
    }
    // Whatever bytes: nothing outside of the ranges is touched.
    std::uint32_t state = 1;
    for (int turn = 0; turn < 20000; ++turn) {
        std::vector<std::uint8_t> coded(1 + turn % 40), out(1 + turn % 97), joined(out.size());
        for (std::uint8_t& byte : coded) byte = static_cast<std::uint8_t>((state = state * 1664525u + 1013904223u) >> 24);
        if (kv::lz4_decode(coded.data(), coded.size(), out.data(), out.size()) && out.size() % 4 == 0)
            kv::join_planes(out.data(), joined.data(), out.size(), 4);
    }
    std::puts("reading plans: passes, ends, damaged slices");
    return 0;
}
