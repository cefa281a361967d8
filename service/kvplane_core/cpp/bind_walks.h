// Work on the state of a core in slices: checks, images and ends of engine lives.
#pragma once

#include "ask.h"
#include "check/check.h"
#include "check/slices.h"
#include "dropping.h"
#include "load.h"
#include "save.h"

namespace kvplane {

constexpr const char* kWalk = "kvplane.walk";

struct Walk {
    explicit Walk(Core& core) : capsule(Py_NewRef(core.capsule)), changes(core.changes) {}
    virtual ~Walk() = default;
    virtual PyObject* Next(Core& core) = 0;

    Owned capsule;  // of the core
    uint64_t changes;
};

template <typename T, typename... Terms>
PyObject* Begin(Core& core, Terms&&... terms) {
    const auto destroy = [](PyObject* one) { delete static_cast<Walk*>(PyCapsule_GetPointer(one, kWalk)); };
    return Capsule(std::unique_ptr<Walk>(std::make_unique<T>(core, std::forward<Terms>(terms)...)), kWalk, destroy);
}

// advance(walk) -> of an image its next bytes, None behind the last ones; of other walks whether work is left, or of a
// check (violated invariant, what contradicts it)
// The interpreter's lock is kept: to get it back can take longer than a slice.
inline PyObject* Advance(PyObject*, PyObject* capsule) {
    return Guarded([&]() -> PyObject* {
        auto* const walk = static_cast<Walk*>(PyCapsule_GetPointer(capsule, kWalk));
        if (walk == nullptr) Owned::Fail();
        Core& core = CoreOf(walk->capsule.get());
        // What changes may have freed is not read.
        Require(core.changes == walk->changes, "the state changed during a walk over it");
        PyObject* const found = walk->Next(core);
        walk->changes = core.changes;
        return found;
    });
}

// -- checks ---------------------------------------------------------------------------------------------------------

struct CheckWalk : Walk {
    explicit CheckWalk(Core& core) : Walk(core), check(core.replica) {}

    PyObject* Next(Core&) override {
        try {
            return ToPy(check.Next());
        } catch (const BrokenInvariant& broken) {
            return Tuple(ToPy(broken.name), ToPy(broken.text));
        }
    }

    StateCheck check;
};

inline PyObject* BeginCheck(Core& core) { return Begin<CheckWalk>(core); }

// -- images ---------------------------------------------------------------------------------------------------------

// Bytes of an image that are returned together, at least.
constexpr size_t kPiece = kSmallTables ? 64 : size_t{1} << 18;

struct SaveWalk : Walk {
    SaveWalk(Core& core, ImageTerms of)
        : Walk(core),
          terms(std::move(of)),
          image(core.replica.blocks.pool.pairs),
          work(SaveState(image, core.replica, terms)) {}

    PyObject* Next(Core&) override {
        if (!has_more) return Py_NewRef(Py_None);
        std::string& bytes = image.bytes;
        do {
            has_more = work.Next();
        } while (has_more && bytes.size() < kPiece);
        const Owned piece(ToBytes(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
        bytes.clear();
        return Py_NewRef(piece.get());
    }

    ImageTerms terms;
    ImageWriter image;
    Slices work;
    bool has_more = true;
};

inline PyObject* BeginSave(Core& core, const std::vector<uint8_t>& spec, const Buffer<uint64_t>& shown,
                           const std::map<Int, std::vector<uint8_t>>& hashers, bool with_statistics,
                           bool hashed, Int run) {
    Check(run > 0);
    ImageTerms terms;
    terms.spec = spec;
    terms.shown.assign(shown.data, shown.data + shown.size);
    terms.hashers = hashers;
    terms.with_statistics = with_statistics;
    terms.hashed = hashed;
    terms.run = static_cast<size_t>(run);
    return Begin<SaveWalk>(core, std::move(terms));
}

// Gives a new core the state of an image; `specs`: digests that its spec may have. Returns (shown, hashers). Raises
// ValueError(field, problem).
inline PyObject* LoadImage(Core& core, const std::vector<std::vector<uint8_t>>& specs, const Buffer<uint8_t>& raw) {
    ImageTerms terms;
    Check(core.changes == 0);
    const auto refuse = [](const std::string& field, const std::string& problem) {
        const Owned why(Tuple(ToPy(field), ToPy(problem)));
        PyErr_SetObject(PyExc_ValueError, why.get());
        throw Raised();
    };
    try {
        Change(core, [&](Replica& replica) {
            WorkAlone(core, [&] {
                ImageReader image({raw.data, raw.size}, kMagic, replica.blocks.pool.pairs);
                LoadedState(image, replica, terms).Load(specs);
            });
        });
    } catch (const NoImage& one) {
        refuse(one.field, one.problem);
    } catch (const Broken& one) {
        refuse("state", std::string("the state contradicts itself: ") + one.what());
    }
    const auto* const shown = reinterpret_cast<const uint8_t*>(terms.shown.data());
    return Tuple(ToBytes(shown, terms.shown.size() * sizeof(uint64_t)), ToPy(terms.hashers));
}

// -- ends of engine lives -------------------------------------------------------------------------------------------

constexpr Int kEndedRequests = 64;  // of one slice; one of a few hundred blocks takes about 50 us
constexpr Int kEndedSlots = 1024;   // of a tier

// Ends an engine life: releases all requests, and drops the keys that the page memory does not confirm. At each pause
// the invariants hold, and the work may begin again. `most`: blocks of a slice.
inline Slices EndLife(Replica& replica, Shown shown, Int most) {
    BlockPool& pool = replica.blocks.pool;
    Tiers& tiers = replica.blocks.tiers;
    replica.tracker.NoteUnderLoad();
    while (replica.tracker.AbandonSome(kEndedRequests, most)) co_yield Pause();
    pool.retained.Suspend();
    if (pool.index.count() > 0) {
        if (!shown.size && replica.keeps_keys) {
            replica.keeps_keys = false;
            tiers.Clear();  // the only event is that no key is left
            if (replica.spec.events) pool.AddEvent({.kind = kCleared});
        }
        KeyDropper dropper(pool);
        for (Int block = 0; block < pool.num_blocks;) {
            block = replica.keeps_keys ? dropper.DropUnproven(block, most, shown) : dropper.DropAll(block, most);
            co_yield Pause();
        }
        const auto has_key = [&](Block block) { return pool.HasKey(block); };
        const auto count = static_cast<size_t>(most);
        for (bool begins = true; pool.split ? pool.split->PutUnkeyedFirst(begins, count, has_key)
                                            : pool.free.PutUnkeyedFirst(begins, count, has_key);
             begins = false)
            co_yield Pause();
    }
    for (Tier& tier : tiers.each) {
        for (Int last = kNoSlot; tiers.EndEpoch(tier, &last, kEndedSlots, shown);) co_yield Pause();
    }
}

struct EndWalk : Walk {
    EndWalk(Core& core, PyObject* stamps, Int most)
        : Walk(core), shown(stamps), work(EndLife(core.replica, Shown{shown.data, shown.size}, most)) {}

    PyObject* Next(Core& core) override {
        return Change(core, [&](Replica&) { return ToPy(work.Next()); });
    }

    Buffer<uint64_t> shown;
    Slices work;
};

// `most`: blocks of a slice.
inline PyObject* BeginEnd(Core& core, PyObject* stamps, Int most) {
    Check(most > 0 && most <= kMaxTokens);
    return Begin<EndWalk>(core, stamps, most);
}

}  // namespace kvplane
