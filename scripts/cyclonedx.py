"""Holds a list of contents against CycloneDX's own JSON schema, with a validator; both come from Python's package index."""

import json
import sys
import zipfile

import fetch

# This package contains the schemas of all versions as files.
SCHEMAS = fetch.Package("cyclonedx-python-lib==11.12.0", "cyclonedx_python_lib-11.12.0-py3-none-any.whl",
                        "0e807521a921a5c3cb8ce1153f8a61d29eedfe76a46aac2796b7c6b573391a54")
VALIDATOR = fetch.Package("fastjsonschema==2.22.3", "fastjsonschema-2.22.3-py3-none-any.whl",
                          "f670b443830b75aca3f00b75949efa20f4b2a80302ec7a21505c28dd54cffd43")


def schema(name):
    with zipfile.ZipFile(fetch.download(SCHEMAS)) as wheel:
        return json.loads(wheel.read(f"cyclonedx/schema/_res/{name}.SNAPSHOT.schema.json"))


def referenced(address):
    """The schema that another one refers to by its address, from the same package."""
    return schema(address.rsplit("/", 1)[-1].removesuffix(".SNAPSHOT.schema.json"))


def fault(document):
    """Returns the first violation of the document's schema; None if there is none."""
    wheel = str(fetch.download(VALIDATOR))
    if wheel not in sys.path:
        sys.path.append(wheel)
    import fastjsonschema
    validate = fastjsonschema.compile(schema(f"bom-{document['specVersion']}"), handlers={"http": referenced})
    try:
        validate(document)
    except fastjsonschema.JsonSchemaException as error:
        return str(error)
    return None
