// Reads in which order `decisions/packing.py` packs the fields of parts and results.
#pragma once

#include "pack_layouts.h"

namespace kvplane {

// pack_with(part, result, image, number of a part's result, of its events, of its image, flat): the layouts, see
// `Packer::Read`, and numbers of chunks.
inline PyObject* PackWith(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Packer::Read(At(arguments, 0), kPartScalars, kPartFields, &Packer::part);
        Packer::Read(At(arguments, 1), kPartResultScalars, kPartResultFields, &Packer::result);
        Packer::Read(At(arguments, 2), kResumeScalars, kResumeFields, &Packer::resume);
        FromPy(At(arguments, 3), &Packer::of_result);
        FromPy(At(arguments, 4), &Packer::of_events);
        FromPy(At(arguments, 5), &Packer::of_resume);
        FromPy(At(arguments, 6), &Packer::flat);
        Packer::is_ready = true;
        Py_RETURN_NONE;
    });
}

}  // namespace kvplane
