// Functions of the module `_native` that write and read the image of a replica.
#pragma once

#include "bind.h"
#include "load.h"
#include "save.h"

namespace kvplane {

constexpr const char* kSave = "kvplane.save";
// Bytes of an image that are returned together, at least.
constexpr size_t kPiece = kSmallTables ? 64 : size_t{1} << 18;

struct SaveWalk {
    SaveWalk(PyObject* core_capsule, Core& core, ImageTerms of)
        : capsule(Py_NewRef(core_capsule)),
          changes(core.changes),
          terms(std::move(of)),
          image(core.replica.blocks.pool.pairs),
          work(SaveState(image, core.replica, terms)) {}

    Owned capsule;  // of the core
    const uint64_t changes;
    ImageTerms terms;
    ImageWriter image;
    Slices work;
    bool has_more = true;
};

// begin_save(core, (spec's digest, keeps_keys, shown, hashers, with_statistics, hashed, run)) -> a walk, see ImageTerms
inline PyObject* BeginSave(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        PyObject* const capsule = At(arguments, 0);
        PyObject* const given = At(arguments, 1);
        Core& core = CoreOf(capsule);
        ImageTerms terms;
        FromPy(At(given, 0), &terms.spec);
        terms.keeps_keys = IsTrue(At(given, 1));
        const Buffer<uint64_t> shown(At(given, 2));
        terms.shown.assign(shown.data, shown.data + shown.size);
        FromPy(At(given, 3), &terms.hashers);
        terms.with_statistics = IsTrue(At(given, 4));
        terms.hashed = IsTrue(At(given, 5));
        const Int run = Number(At(given, 6));
        Check(run > 0);
        terms.run = static_cast<size_t>(run);
        const auto destroy = [](PyObject* one) { delete static_cast<SaveWalk*>(PyCapsule_GetPointer(one, kSave)); };
        return Capsule(std::make_unique<SaveWalk>(capsule, core, std::move(terms)), kSave, destroy);
    });
}

// save(walk) -> the next bytes of the image; None behind the last ones
inline PyObject* SaveSlice(PyObject*, PyObject* capsule) {
    return Guarded([&]() -> PyObject* {
        auto* const walk = static_cast<SaveWalk*>(PyCapsule_GetPointer(capsule, kSave));
        if (walk == nullptr) Owned::Fail();
        // What changes may have freed is not read.
        Require(CoreOf(walk->capsule.get()).changes == walk->changes, "the state changed while it was saved");
        if (!walk->has_more) Py_RETURN_NONE;
        std::string& bytes = walk->image.bytes;
        do {
            walk->has_more = walk->work.Next();
        } while (walk->has_more && bytes.size() < kPiece);
        const Owned piece(ToBytes(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
        bytes.clear();
        return Py_NewRef(piece.get());
    });
}

// load(core, digests of the spec, image) -> (keeps_keys, shown, hashers): gives a new core the state of an image.
// Raises ValueError(field, problem).
inline PyObject* LoadImage(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        ImageTerms terms;
        std::vector<std::vector<uint8_t>> specs;
        FromPy(At(arguments, 1), &specs);
        const Buffer<uint8_t> raw(At(arguments, 2));
        Check(core.changes == 0);
        const auto refuse = [](const std::string& field, const std::string& problem) -> PyObject* {
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
            return refuse(one.field, one.problem);
        } catch (const Broken& one) {
            return refuse("state", std::string("the state contradicts itself: ") + one.what());
        }
        const auto* const shown = reinterpret_cast<const uint8_t*>(terms.shown.data());
        return Tuple(PyBool_FromLong(terms.keeps_keys), ToBytes(shown, terms.shown.size() * sizeof(uint64_t)),
                     ToPy(terms.hashers));
    });
}

}  // namespace kvplane
