// Reads in which order `decisions/packing.py` packs the fields of parts and results.
#pragma once

#include "pack_layouts.h"

namespace kvplane {

// pack_with(part, result, number of a part's result, number of its events, flat): the layouts, see `Packer::Read`, and
// numbers of chunks.
inline PyObject* PackWith(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Packer::Read(At(arguments, 0), kPartScalars, kPartFields, &Packer::part);
        Packer::Read(At(arguments, 1), kPartResultScalars, kPartResultFields, &Packer::result);
        FromPy(At(arguments, 2), &Packer::of_result);
        FromPy(At(arguments, 3), &Packer::of_events);
        FromPy(At(arguments, 4), &Packer::flat);
        Packer::is_ready = true;
        Py_RETURN_NONE;
    });
}

}  // namespace kvplane
