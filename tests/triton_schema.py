"""What config.pbtxt is parsed with: the part of Triton's published schema that a model like ours may use.

Facts of triton-inference-server/common 83adf7c, protobuf/model_config.proto: names, numbers and types of fields. The
package that ships the whole schema, tritonclient, wants an older protobuf than onnx brings.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

# message -> field -> (number, type). "repeated " and "map " as in the schema.
MESSAGES = {
    "ModelParameter": {"string_value": (1, "string")},
    "ModelInput": {
        "name": (1, "string"),
        "data_type": (2, "DataType"),
        "dims": (4, "repeated int64"),
        "allow_ragged_batch": (7, "bool"),
        "optional": (8, "bool"),
    },
    "ModelOutput": {"name": (1, "string"), "data_type": (2, "DataType"), "dims": (3, "repeated int64")},
    "ModelInstanceGroup": {
        "name": (1, "string"),
        "kind": (4, "Kind"),
        "count": (2, "int32"),
        "gpus": (3, "repeated int32"),
    },
    "ModelConfig": {
        "name": (1, "string"),
        "platform": (2, "string"),
        "backend": (17, "string"),
        "runtime": (25, "string"),
        "max_batch_size": (4, "int32"),
        "input": (5, "repeated ModelInput"),
        "output": (6, "repeated ModelOutput"),
        "instance_group": (7, "repeated ModelInstanceGroup"),
        "default_model_filename": (8, "string"),
        "parameters": (14, "map ModelParameter"),
    },
}
ENUMS = {
    "DataType": "TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 TYPE_INT32 "
    "TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16",
    "Kind": "KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL",
}
SCALARS = {"string": 9, "int64": 3, "int32": 5, "bool": 8}  # FieldDescriptorProto.Type
ENUM, MESSAGE = 14, 11


def parse(text):
    """A ModelConfig from text format. Raises text_format.ParseError for what the schema does not have."""
    return text_format.Parse(text, _message("ModelConfig"))


def _message(name):
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    for enum, values in ENUMS.items():
        added = file.enum_type.add(name=enum)
        for number, value in enumerate(values.split()):
            added.value.add(name=value, number=number)
    for message, fields in MESSAGES.items():
        added = file.message_type.add(name=message)
        for field, (number, kind) in fields.items():
            _add_field(added, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}"))()


def _add_field(message, name, number, kind):
    label, _, base = kind.rpartition(" ")
    if label == "map":
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string")
        _add_field(entry, "value", 2, base)
        base = f"{message.name}.{entry.name}"
    field = message.field.add(name=name, number=number, label=3 if label else 1)
    if base in SCALARS:
        field.type = SCALARS[base]
    else:
        field.type, field.type_name = (ENUM if base in ENUMS else MESSAGE), f".inference.{base}"
