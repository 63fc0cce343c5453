"""The wire of the last release, kept as a descriptor set: what it says is still read, and means the same.

`data/protos_0_2_0.binpb` was made of `proto/` at that release, by `protoc --include_imports --descriptor_set_out`. A
release that changes what old peers can work with raises `PROTOCOL_VERSION`, and replaces the file by its own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool, json_format
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import VersionMismatch
from slipstream.rpc.codec import model_info_message, read_model_info
from slipstream.rpc.v1 import archive_pb2, common_pb2, draft_pb2, gateway_pb2, target_pb2
from slipstream.service_info import LEAST_PROTOCOL_VERSION, PROTOCOL_VERSION, ModelInfo, check_protocol

FILES = FileDescriptorSet.FromString((Path(__file__).parent / "data" / "protos_0_2_0.binpb").read_bytes()).file
NOW = {file.DESCRIPTOR.name: file.DESCRIPTOR for file in (archive_pb2, common_pb2, draft_pb2, gateway_pb2, target_pb2)}
POOL = descriptor_pool.DescriptorPool()
for _file in FILES:
    POOL.Add(_file)  # type: ignore[no-untyped-call]
THEN = {file.name: POOL.FindFileByName(file.name) for file in FILES}  # type: ignore[no-untyped-call]


def _messages(file: Any) -> Iterator[Any]:
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        waiting += message.nested_types
        yield message


OLD_MESSAGES = {message.full_name: message for file in THEN.values() for message in _messages(file)}
NEW_MESSAGES = {message.full_name: message for file in NOW.values() for message in _messages(file)}


def _kind(field: Any) -> tuple[Any, ...]:
    """All that decides how a field's bytes are read."""
    named = field.message_type or field.enum_type
    oneof = field.containing_oneof.name if field.containing_oneof else None
    return field.name, field.type, field.is_repeated, field.has_presence, oneof, named.full_name if named else None


@pytest.mark.parametrize("name", sorted(OLD_MESSAGES))
def test_every_field_keeps_its_number_and_type(name: str) -> None:
    old, new = OLD_MESSAGES[name], NEW_MESSAGES[name]
    then = {number: _kind(field) for number, field in old.fields_by_number.items()}
    now = {number: _kind(field) for number, field in new.fields_by_number.items()}
    assert {number: now.get(number) for number in then} == then


def test_every_enum_and_call_is_still_there() -> None:
    for name, then in THEN.items():
        now = NOW[name]
        for enum in then.enum_types_by_name.values():
            values = {value.name: value.number for value in now.enum_types_by_name[enum.name].values}
            assert values.items() >= {(value.name, value.number) for value in enum.values}
        for service in then.services_by_name.values():
            methods = now.services_by_name[service.name].methods_by_name
            for method in service.methods:
                kept = methods[method.name]
                assert (kept.input_type.full_name, kept.client_streaming, kept.server_streaming) == (
                    method.input_type.full_name,
                    method.client_streaming,
                    method.server_streaming,
                )
                assert kept.output_type.full_name == method.output_type.full_name


def _scalars(field: Any) -> st.SearchStrategy[Any]:
    kinds: dict[int, st.SearchStrategy[Any]] = {
        field.CPPTYPE_BOOL: st.booleans(),
        field.CPPTYPE_STRING: st.text(max_size=9) if field.type == field.TYPE_STRING else st.binary(max_size=9),
        field.CPPTYPE_DOUBLE: st.floats(allow_nan=False, allow_infinity=False),
        field.CPPTYPE_FLOAT: st.floats(allow_nan=False, allow_infinity=False, width=32),
        field.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
        field.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
        field.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
        field.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    }
    if field.cpp_type == field.CPPTYPE_ENUM:
        return st.sampled_from([value.number for value in field.enum_type.values])
    return kinds[field.cpp_type]


def _fill(data: st.DataObject, message: Any, depth: int = 0) -> None:
    for field in message.DESCRIPTOR.fields:
        if depth > 3 or not data.draw(st.booleans()):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)["key"] = "value"
        elif field.message_type is not None and field.is_repeated:
            _fill(data, getattr(message, field.name).add(), depth + 1)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            _fill(data, getattr(message, field.name), depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(data.draw(st.lists(_scalars(field), max_size=3)))
        else:
            setattr(message, field.name, data.draw(_scalars(field)))


@given(st.sampled_from(sorted(OLD_MESSAGES)), st.data())
def test_what_it_says_means_the_same(name: str, data: st.DataObject) -> None:
    old = GetMessageClass(OLD_MESSAGES[name])()
    if not OLD_MESSAGES[name].GetOptions().map_entry:
        _fill(data, old)
    new = GetMessageClass(NEW_MESSAGES[name]).FromString(old.SerializeToString())
    assert json_format.MessageToDict(new) == json_format.MessageToDict(old)
    back = type(old).FromString(new.SerializeToString())
    assert back == old


# -- versions ---------------------------------------------------------------------------------------------------------


def _info(speaks: int, least: int) -> ModelInfo:
    return ModelInfo(protocol_version=speaks, least_protocol_version=least)


@pytest.mark.parametrize("ours", [(2, 2), (3, 2), (5, 5)])
@pytest.mark.parametrize("theirs", [(0, 0), (1, 1), (2, 1), (2, 2), (3, 2), (4, 4), (6, 3)])
def test_two_releases_meet_or_say_which_is_too_old(ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    def check() -> None:
        check_protocol("draft", _info(*theirs), "gateway", _info(*ours))

    if max(theirs[0], 1) < ours[1]:
        with pytest.raises(VersionMismatch, match=f"needs at least version {ours[1]}: upgrade the draft"):
            check()
    elif ours[0] < theirs[1]:
        with pytest.raises(VersionMismatch, match=f"needs at least version {theirs[1]}: upgrade the gateway"):
            check()
    else:
        check()


def test_a_service_tells_its_version() -> None:
    told = read_model_info(common_pb2.ModelInfo.FromString(model_info_message(ModelInfo()).SerializeToString()))
    assert (told.protocol_version, told.least_protocol_version) == (PROTOCOL_VERSION, LEAST_PROTOCOL_VERSION)
    check_protocol("target", told, "gateway", ModelInfo())


def test_the_last_release_tells_none() -> None:
    old = GetMessageClass(OLD_MESSAGES["slipstream.rpc.v1.ModelInfo"])(model_id="m")
    told = read_model_info(common_pb2.ModelInfo.FromString(old.SerializeToString()))
    with pytest.raises(VersionMismatch, match="the target speaks protocol version 1, and the gateway needs at least"):
        check_protocol("target", told, "gateway", ModelInfo())
