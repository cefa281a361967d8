"""Run by an interpreter with other versions: serializes and parses every message of the contract, with all fields set.

Prints the versions of protobuf and grpc, the number of messages, the number of client stubs.
"""

from __future__ import annotations

import importlib
import pkgutil

import google.protobuf
import grpc

import kvplane.v1


def fill(message, depth):
    """Give every field a value; a oneof keeps its last, recursion ends at `depth`."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        inner = field.message_type
        if inner and inner.GetOptions().map_entry:
            key = sample(inner.fields_by_name["key"])
            entry = inner.fields_by_name["value"]
            if entry.message_type and not depth:
                continue
            if entry.message_type:
                fill(value[key], depth - 1)
            else:
                value[key] = sample(entry)
        elif inner and depth:
            fill(value.add() if hasattr(value, "add") else value, depth - 1)
        elif hasattr(value, "append") and not inner:
            value.append(sample(field))
        elif not inner:
            setattr(message, field.name, sample(field))


def sample(field):
    """Return a value of the field's type that is not its default."""
    if field.enum_type:
        return field.enum_type.values[-1].number
    if field.cpp_type == field.CPPTYPE_STRING:
        return b"\xff" if field.type == field.TYPE_BYTES else "text"
    if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return 0.5
    return True if field.cpp_type == field.CPPTYPE_BOOL else 7


def main():
    names = [module.name for module in pkgutil.iter_modules(kvplane.v1.__path__)]
    modules = [importlib.import_module(f"kvplane.v1.{name}") for name in names]
    kinds = [
        getattr(module, name)
        for module in modules
        if hasattr(module, "DESCRIPTOR")
        for name in module.DESCRIPTOR.message_types_by_name
    ]
    for kind in kinds:
        message = kind()
        fill(message, depth=3)
        assert message.ByteSize() > 0 or not message.DESCRIPTOR.fields, kind
        assert kind.FromString(message.SerializeToString()) == message, kind
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        stubs = [getattr(m, name)(channel) for m in modules for name in dir(m) if name.endswith("Stub")]
    print(google.protobuf.__version__, grpc.__version__, len(kinds), len(stubs))


if __name__ == "__main__":
    main()
