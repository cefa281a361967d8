from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ColumnType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    U32: _ClassVar[ColumnType]
    I32: _ClassVar[ColumnType]
    U64: _ClassVar[ColumnType]
    BITS: _ClassVar[ColumnType]

class ColumnRows(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EACH: _ClassVar[ColumnRows]
    ANY: _ClassVar[ColumnRows]
U32: ColumnType
I32: ColumnType
U64: ColumnType
BITS: ColumnType
EACH: ColumnRows
ANY: ColumnRows
COLUMN_FIELD_NUMBER: _ClassVar[int]
column: _descriptor.FieldDescriptor

class Column(_message.Message):
    __slots__ = ("type", "default", "rows", "table", "highest", "packed_from", "values", "range")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    PACKED_FROM_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    type: ColumnType
    default: int
    rows: ColumnRows
    table: str
    highest: int
    packed_from: int
    values: str
    range: str
    def __init__(self, type: _Optional[_Union[ColumnType, str]] = ..., default: _Optional[int] = ..., rows: _Optional[_Union[ColumnRows, str]] = ..., table: _Optional[str] = ..., highest: _Optional[int] = ..., packed_from: _Optional[int] = ..., values: _Optional[str] = ..., range: _Optional[str] = ...) -> None: ...
