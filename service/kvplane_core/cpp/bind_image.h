// Functions of the module `_native` that write and read the image of a replica.
#pragma once

#include "bind_walk.h"
#include "load.h"
#include "save.h"

namespace kvplane {

// Bytes of an image that are returned together, at least.
constexpr size_t kPiece = kSmallTables ? 64 : size_t{1} << 18;

struct SaveWalk : Walk {
    SaveWalk(PyObject* core_capsule, Core& core, ImageTerms of)
        : Walk(core_capsule, core),
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

// begin_save(core, (spec's digest, shown, hashers, with_statistics, hashed, run)) -> a walk, see ImageTerms
inline PyObject* BeginSave(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        PyObject* const capsule = At(arguments, 0);
        PyObject* const given = At(arguments, 1);
        Core& core = CoreOf(capsule);
        ImageTerms terms;
        FromPy(At(given, 0), &terms.spec);
        const Buffer<uint64_t> shown(At(given, 1));
        terms.shown.assign(shown.data, shown.data + shown.size);
        FromPy(At(given, 2), &terms.hashers);
        terms.with_statistics = IsTrue(At(given, 3));
        terms.hashed = IsTrue(At(given, 4));
        const Int run = Number(At(given, 5));
        Check(run > 0);
        terms.run = static_cast<size_t>(run);
        return WalkToPy(std::make_unique<SaveWalk>(capsule, core, std::move(terms)));
    });
}

// load(core, digests of the spec, image) -> (shown, hashers): gives a new core the state of an image.
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
        return Tuple(ToBytes(shown, terms.shown.size() * sizeof(uint64_t)), ToPy(terms.hashers));
    });
}

}  // namespace kvplane
