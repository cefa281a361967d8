// The Python module `_native`: a replica's core behind a capsule. `kvplane_service.core.native` is its only user.

#include "read_step.h"
#include "state.h"

namespace kvplane {
namespace {

constexpr const char* kName = "kvplane.core";

struct Core {
    explicit Core(Spec spec) : replica(std::move(spec)) {}
    Replica replica;
    Step step;  // the last one that was read
    bool has_step = false;
};

// -- the functions of the module -------------------------------------------------------------------------------------

Core& CoreOf(PyObject* capsule) {
    void* core = PyCapsule_GetPointer(capsule, kName);
    if (core == nullptr) Owned::Fail();
    return *static_cast<Core*>(core);
}

// Runs `body`; a C++ exception becomes a Python one.
template <typename F>
PyObject* Guarded(F&& body) {
    try {
        return body();
    } catch (const Unreadable&) {
        PyErr_SetString(PyExc_ValueError, "a value has another type or range than the core reads");
    } catch (const std::exception& broken) {
        PyErr_SetString(PyExc_AssertionError, broken.what());
    }
    return nullptr;
}

void Destroy(PyObject* capsule) { delete static_cast<Core*>(PyCapsule_GetPointer(capsule, kName)); }

PyObject* New(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Column values;
        std::vector<Column> groups;
        FromPy(At(arguments, 0), &values);
        FromPy(At(arguments, 1), &groups);
        Spec spec;
        Int* const fields[] = {&spec.num_blocks,
                               &spec.max_model_len,
                               &spec.hash_block_size,
                               &spec.scheduler_block_size,
                               &spec.enable_caching,
                               &spec.retention_interval,
                               &spec.partial_hits,
                               &spec.watermark_blocks,
                               &spec.safe,
                               &spec.prefill_lookahead,
                               &spec.keep_divergence_boundary,
                               &spec.events,
                               &spec.digest_size,
                               &spec.hash_lookahead_tokens,
                               &spec.align_block_size,
                               &spec.align_chunk_limit,
                               &spec.align_stop_at_tail};
        Check(values.size() == std::size(fields));
        for (size_t at = 0; at < values.size(); ++at) *fields[at] = values[at];
        for (const Column& group : groups) {
            Check(group.size() == 13 && group[0] >= kFull && group[0] <= kUncachedState);
            spec.groups.push_back({group[0], group[1], group[2], group[3], group[4], group[5], group[6], group[7],
                                   group[8], group[9], group[10], group[11], group[12]});
        }
        Check(spec.num_blocks >= 2 && !spec.groups.empty());
        return PyCapsule_New(new Core(std::move(spec)), kName, Destroy);
    });
}

enum StepKind : long { kRefusedStep = 0, kPlain = 1, kHasTokens = 2, kResumes = 3 };

// read(core, step) -> StepKind: whether the core can apply the step, and whether its tokens must be hashed before
PyObject* Read(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        core.has_step = false;
        bool resumes = false;
        try {
            ReadStep(At(arguments, 1), &core.step, &resumes);
        } catch (const Unreadable&) {
            return PyLong_FromLong(kRefusedStep);
        }
        if (resumes || !core.replica.Accepts(core.step)) return PyLong_FromLong(resumes ? kResumes : kRefusedStep);
        core.has_step = true;
        const auto has_tokens = [](const Part& part) { return part.facts.num_tokens || part.news.num_token_ids; };
        return PyLong_FromLong(std::any_of(core.step.parts.begin(), core.step.parts.end(), has_tokens) ? kHasTokens
                                                                                                       : kPlain);
    });
}

void ReadMade(PyObject* given, Made* made) {
    if (given == Py_None) return;
    ReadColumn(At(given, 0), &made->num_hashes);
    ReadHashes(At(given, 1), &made->hashes);
    made->given = true;
}

// apply(made) of the step that was read; made: None, or per part a pair of None or (num_hashes, hashes), of facts and
// news
PyObject* Apply(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        PyObject* made = At(arguments, 1);
        Require(std::exchange(core.has_step, false), "no step was read");
        for (size_t number = 0; made != Py_None && number < core.step.parts.size(); ++number) {
            PyObject* of_part = At(made, static_cast<Py_ssize_t>(number));
            ReadMade(At(of_part, 0), &core.step.parts[number].facts_made);
            ReadMade(At(of_part, 1), &core.step.parts[number].news_made);
        }
        std::vector<PartResult> results = core.replica.Apply(core.step);
        PyObject* list = PyList_New(static_cast<Py_ssize_t>(results.size()));
        Py_ssize_t at = 0;
        for (PartResult& result : results) PyList_SetItem(list, at++, ToPy(result));
        return Tuple(ToPy(core.replica.blocks.pool.executed_through), list);
    });
}

PyObject* Dump(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        const Dumper dump{PyDict_New()};
        VisitState(dump, core.replica);
        DumpKeys(core.replica, dump);
        dump.Set("managers", DumpManagers(core.replica));
        return dump.into;
    });
}

PyObject* Load(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        const Loader load{At(arguments, 1)};
        VisitState(load, core.replica);
        LoadKeys(load, core.replica);
        LoadManagers(load.Get("managers"), core.replica);
        core.replica.blocks.pool.ForgetStamped();
        Py_RETURN_NONE;
    });
}

// events(capsule) -> the events of a part, as tuples
PyObject* Events(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const auto* events = static_cast<std::vector<Event>*>(PyCapsule_GetPointer(At(arguments, 0), kEvents));
        if (events == nullptr) Owned::Fail();
        return ToList(*events);
    });
}

// find(core, digests joined, size of one, domain, max_tokens) -> (tokens, single group hit, blocks per group)
PyObject* Find(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Core& core = CoreOf(At(arguments, 0));
        Digests digests;
        std::string domain;
        FromPy(At(arguments, 1), &digests.bytes);
        FromPy(At(arguments, 2), &digests.size);
        FromPy(At(arguments, 3), &domain);
        Replica& replica = core.replica;
        uint32_t id = kUnknownDomain;
        replica.blocks.pool.pairs.Known(domain, &id);
        const Hit hit = replica.blocks.lookup->Find(digests, id, Number(At(arguments, 4)), replica.Horizon());
        return Tuple(ToPy(hit.num_tokens), ToPy(hit.single_group_hit), ToPy(hit.blocks));
    });
}

// peek(core, slot) -> as find
PyObject* PeekSlot(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Hit hit = CoreOf(At(arguments, 0)).replica.blocks.FindHit(Number(At(arguments, 1)));
        return Tuple(ToPy(hit.num_tokens), ToPy(hit.single_group_hit), ToPy(hit.blocks));
    });
}

// column(core, name) -> memoryview of a column of the requests, one entry per slot; the caller keeps the core
PyObject* ColumnOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Requests& requests = CoreOf(At(arguments, 0)).replica.blocks.requests;
        std::string wanted;
        FromPy(At(arguments, 1), &wanted);
        const auto view = [](void* data, size_t size) {
            return PyMemoryView_FromMemory(static_cast<char*>(data), static_cast<Py_ssize_t>(size), PyBUF_READ);
        };
        for (auto& [name, flags] : requests.Flags()) {
            if (wanted == name) return view(flags->data(), flags->size());
        }
        for (auto& [name, numbers] : requests.Numbers()) {
            if (wanted == name) return view(numbers->data(), numbers->size() * sizeof(Int));
        }
        Owned::Fail();
    });
}

// request(core, slot) -> (request id, hashes joined, size of one, blocks that a transfer holds)
PyObject* RequestOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Replica& replica = CoreOf(At(arguments, 0)).replica;
        const Int slot = Number(At(arguments, 1));
        Check(slot >= 0 && slot < kMaxSlots);
        const Requests& requests = replica.blocks.requests;
        const auto held = replica.tracker.held.find(slot);
        return Tuple(ToPy(requests.request_id[slot]), ToPy(requests.content[slot].bytes),
                     ToPy(requests.content[slot].size),
                     ToPy(held == replica.tracker.held.end() ? Int{0} : static_cast<Int>(held->second.size())));
    });
}

// keys(core, blocks) -> per block (stamp, key_step, [((pair, digest), tokens), ...]), the primary key first
PyObject* KeysOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const BlockPool& pool = CoreOf(At(arguments, 0)).replica.blocks.pool;
        BlockList blocks;
        FromPy(At(arguments, 1), &blocks);
        PyObject* list = PyList_New(static_cast<Py_ssize_t>(blocks.size()));
        Py_ssize_t at = 0;
        for (const Block block : blocks) {
            Require(block < pool.num_blocks, "a block is beyond the pool");
            PyList_SetItem(list, at++,
                           Tuple(ToPy(pool.stamp[block]), ToPy(pool.key_step[block]), ToPy(AllKeysOf(pool, block))));
        }
        return list;
    });
}

// blocks(core, domain, group, digest) -> (blocks that have the key, step that registered it at the first)
PyObject* BlocksOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const BlockPool& pool = CoreOf(At(arguments, 0)).replica.blocks.pool;
        std::string domain;
        Digest digest;
        uint32_t id = kUnknownDomain;
        FromPy(At(arguments, 1), &domain);
        FromPy(At(arguments, 3), &digest);
        pool.pairs.Known(domain, &id);
        const BlockList blocks = pool.BlocksOf(Key{pool.pairs.Of(id, Number(At(arguments, 2))), digest});
        return Tuple(ToPy(blocks), ToPy(blocks.empty() ? Int{0} : pool.key_step[blocks.front()]));
    });
}

// can_rewind(core, slot, computed)
PyObject* CanRewind(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Coordinator& blocks = CoreOf(At(arguments, 0)).replica.blocks;
        const Int slot = Number(At(arguments, 1));
        Check(slot >= 0 && slot < blocks.requests.size());
        return PyBool_FromLong(blocks.CanRewind(slot, Number(At(arguments, 2))));
    });
}

// align_chunk(core, slot, start, wanted) -> tokens of the chunk
PyObject* AlignChunkOf(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Coordinator& blocks = CoreOf(At(arguments, 0)).replica.blocks;
        const Int slot = Number(At(arguments, 1));
        Check(slot >= 0 && slot < blocks.requests.size());
        return ToPy(AlignChunk(blocks, slot, Number(At(arguments, 2)), Number(At(arguments, 3))));
    });
}

// numbers(core) -> (seq, epoch, executed_through, num_free, num_evictable, num_running, number of domains)
PyObject* Numbers(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        const Replica& replica = CoreOf(At(arguments, 0)).replica;
        const BlockPool& pool = replica.blocks.pool;
        return Tuple(ToPy(replica.seq), ToPy(pool.epoch), ToPy(pool.executed_through), ToPy(pool.num_free()),
                     ToPy(pool.num_evictable), ToPy(replica.blocks.requests.num_running));
    });
}

// books(core) -> (busy blocks, keys per group, (allocated, adopted) per group, (granting step, rows) per step in
// flight, counters, slots that load, names of domains by number)
PyObject* Books(PyObject*, PyObject* arguments) {
    return Guarded([&]() -> PyObject* {
        Replica& replica = CoreOf(At(arguments, 0)).replica;
        std::vector<std::pair<Int, Int>> groups, granted;
        for (const auto& one : replica.blocks.managers) groups.emplace_back(one->allocated, one->adopted);
        for (const auto& [step, grants] : replica.tracker.grants)
            granted.emplace_back(step, static_cast<Int>(grants.slot.size()));
        Column counts;
        for (const auto& [name, count] : replica.counters.All()) counts.push_back(*count);
        const BlockPool& pool = replica.blocks.pool;
        return Tuple(ToPy(pool.busy), ToPy(pool.keys_of_group), ToPy(groups), ToPy(granted), ToPy(counts),
                     ToPy(replica.blocks.requests.loading), ToPy(pool.pairs.Names()));
    });
}

PyMethodDef kMethods[] = {
    {"new", New, METH_VARARGS, "Make a core."},
    {"read", Read, METH_VARARGS, "Read a step; return its kind."},
    {"apply", Apply, METH_VARARGS, "Apply the step that was read."},
    {"dump", Dump, METH_VARARGS, "Return the whole state."},
    {"load", Load, METH_VARARGS, "Set the whole state of a new core."},
    {"events", Events, METH_VARARGS, "Return the events of a part."},
    {"find", Find, METH_VARARGS, "Find a cached prefix."},
    {"peek", PeekSlot, METH_VARARGS, "Find the cached prefix of a request."},
    {"column", ColumnOf, METH_VARARGS, "Return a view of a column of the requests."},
    {"request", RequestOf, METH_VARARGS, "Return what is known of a request besides the columns."},
    {"keys", KeysOf, METH_VARARGS, "Return stamps and keys of blocks."},
    {"blocks", BlocksOf, METH_VARARGS, "Return the blocks of a key."},
    {"can_rewind", CanRewind, METH_VARARGS, "Whether tokens can be computed again."},
    {"align_chunk", AlignChunkOf, METH_VARARGS, "Shorten a chunk to where states can be cached."},
    {"books", Books, METH_VARARGS, "Return counters and records."},
    {"numbers", Numbers, METH_VARARGS, "Return numbers of the state."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace kvplane

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&kvplane::kModule);
    if (module != nullptr && PyModule_AddStringConstant(module, "SOURCES", KVPLANE_SOURCES) < 0) Py_CLEAR(module);
    return module;
}
