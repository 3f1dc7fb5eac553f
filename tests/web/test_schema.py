"""The OpenAPI schema says what the interface does: checked by hand, and by requests that schemathesis makes up."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS
from small_explorer import noise, small_model

from cumulant.web import Example, create_app

APP = create_app({"softmax": small_model("softmax")}, [Example(noise(0), "0")], hosts=("testserver",))
SCHEMA = schemathesis.openapi.from_dict(APP.openapi())
SCHEMA.app = APP


def test_every_operation_has_a_summary_typed_answers_and_typed_problems():
    schema = APP.openapi()
    operations = [one for path in schema["paths"].values() for one in path.values()]
    assert len(operations) == 12
    for operation in operations:
        assert operation["description"]
        for status, response in operation["responses"].items():
            (media,) = response["content"].values()
            assert media["schema"], (operation["operationId"], status)
            if status >= "400":
                assert media["schema"]["$ref"].endswith("/Problem")


@SCHEMA.parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_made_up_requests_get_the_answers_that_the_schema_names(case):
    excluded = []
    if case.operation.path == "/api/images":  # random bytes fit the schema and are no picture
        excluded = CHECKS.get_by_names(["positive_data_acceptance"])
    case.call_and_validate(excluded_checks=excluded)


@SCHEMA.include(method="POST", path_regex="^/api/(?!images)").parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_made_up_questions_about_a_model_that_is_there_never_fail(case):
    if not isinstance(case.body, dict):
        return
    small = {name: case.body[name] % 6 for name in ("query", "layer") if isinstance(case.body.get(name), int)}
    case.body = {**case.body, **small, "model": "softmax", "image": "example-0"}
    names = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
    case.call_and_validate(checks=CHECKS.get_by_names(names))
