"""Names the field of a request that protobuf could not parse."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from coppice.errors import CoppiceError, InvalidArgument


def unparsable(descriptor: Descriptor, raw: bytes) -> CoppiceError:
    """Why `raw` is no message of `descriptor`.

    The parser refuses a whole message for one string that is not UTF-8 without saying which, so
    a twin of the message that takes any bytes there is parsed and searched.
    """
    twin = _twin(descriptor)()
    try:
        twin.ParseFromString(raw)
    except DecodeError:
        return InvalidArgument("request", raw, f"a message of type {descriptor.full_name}")
    for path, value in _byte_fields(twin, ""):
        try:
            value.decode()
        except UnicodeDecodeError:
            return InvalidArgument(path, value, "valid UTF-8")
    return InvalidArgument("request", raw, f"a message of type {descriptor.full_name}")


@cache
def _twin(descriptor: Descriptor) -> type[Message]:
    """The message class with every string field turned into bytes, in a pool of its own."""
    pool = descriptor_pool.DescriptorPool()
    _add_file(pool, descriptor.file, set())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _add_file(pool: descriptor_pool.DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add_file(pool, dependency, added)
    twin = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(twin)
    _strings_to_bytes(twin.message_type)
    pool.Add(twin)


def _strings_to_bytes(messages: Sequence[descriptor_pb2.DescriptorProto]) -> None:
    for message in messages:
        for field in message.field:
            is_map_key = message.options.map_entry and field.number == 1
            if field.type == descriptor_pb2.FieldDescriptorProto.TYPE_STRING and not is_map_key:
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
        _strings_to_bytes(message.nested_type)


def _byte_fields(message: Message, prefix: str) -> Iterator[tuple[str, bytes]]:
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        for name, item in _items(field, value, path):
            if isinstance(item, bytes):
                yield name, item
            elif isinstance(item, Message):
                yield from _byte_fields(item, f"{name}.")


def _items(field: FieldDescriptor, value: Any, path: str) -> Iterator[tuple[str, object]]:
    """The elements of a list or map with their names, or the one value."""
    if not field.is_repeated:
        yield path, value
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        yield from ((f"{path}[{key}]", value[key]) for key in value)
    else:
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
