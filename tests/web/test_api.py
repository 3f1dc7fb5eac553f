"""The explorer's answers are those of the model itself."""

import io
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from PIL import Image
from small_explorer import NAMES, ask, encoded, local_client, noise, small_model

from cumulant import create_model, explain
from cumulant.web import Example, Explorable, Limits, create_app, looking

QUERY = {"model": "cumulant3", "image": "example-1", "query": 6}


def test_info_names_models_examples_and_limits(client):
    info = client.get("/api/info").json()
    assert [model["name"] for model in info["models"]] == list(NAMES)
    assert info["models"][1] | {"accuracy": None} == {
        "name": "cumulant3",
        "title": "small",
        "attention": "cumulant3",
        "layers": 2,
        "heads": 4,
        "prefix": 1,
        "times": 1,
        "grid": [4, 4],
        "axes": ["all", "all"],
        "size": 8,
        "classes": 10,
        "accuracy": None,
        "lens": True,
        "collection": "",
        "interpreter": False,
    }
    assert [example["label"] for example in info["examples"]] == ["0", "1", "2"]
    assert info["limits"] == {"upload_bytes": 200_000, "pixels": 1_000_000}


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_model(client, models, examples, name):
    answer = ask(client, "attention", **{**QUERY, "model": name})
    one = models[name]
    with explain.capture(one.model, one.images(examples[1].picture), queries=[6]) as captured:
        pass
    expected = torch.stack([captured.maps(layer)[0, :, 0] for layer in (0, 1)])
    torch.testing.assert_close(torch.tensor(answer["weights"]), expected, atol=1e-6, rtol=0)
    mass = expected.clamp(max=0).sum(-1).neg()
    torch.testing.assert_close(torch.tensor(answer["negative_mass"]), mass, atol=1e-5, rtol=0)


def test_weights_of_a_query_sum_to_one_and_cumulant_has_negative_ones(client):
    weights = torch.tensor(ask(client, "attention", **QUERY)["weights"])
    assert weights.shape == (2, 4, 17)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4), atol=1e-4, rtol=0)
    assert (weights < 0).any()


def test_once_an_image_is_chosen_a_click_needs_no_pass(models, examples, monkeypatch):
    client = local_client(create_app(models, examples))
    ask(client, "prediction", model="cumulant3", image="example-1")
    for what in ("record", "answer"):
        monkeypatch.setattr(looking, what, lambda *_: pytest.fail("a pass"))
    ask(client, "attention", **QUERY)
    ask(client, "summary", model="cumulant3", image="example-1")
    ask(client, "flow", **QUERY)
    ask(client, "lens", **QUERY, layer=1, logit_scale=2.0)


def test_passes_that_do_not_fit_in_memory_are_made_again(models, examples):
    frugal = local_client(create_app(models, examples, Limits(recorded_bytes=1)))
    first = ask(frugal, "attention", **QUERY)
    ask(frugal, "attention", **{**QUERY, "image": "example-0"})
    assert ask(frugal, "attention", **QUERY) == first
    assert len(frugal.app.state.engine._recordings) == 1


def test_switching_off_all_heads_of_a_layer_equals_a_projection_of_zeros(client, examples):
    off = [{"layer": 1, "head": head} for head in range(4)]
    answer = ask(client, "prediction", model="softmax", image="example-2", off=off)
    changed = small_model("softmax")
    changed.model.blocks[1].attn.proj.weight.zero_()
    expected = changed.model(changed.images(examples[2].picture))[0].softmax(-1)
    for choice in answer["choices"]:
        assert choice["after"] == pytest.approx(float(expected[choice["index"]]), abs=1e-5)
    assert answer["divergence"] > 1e-6
    assert int(expected.argmax()) in [choice["index"] for choice in answer["choices"][:2]]


def test_with_all_heads_on_nothing_changes(client):
    answer = ask(client, "prediction", model="softmax", image="example-0")
    assert answer["divergence"] == 0
    assert all(choice["before"] == choice["after"] for choice in answer["choices"])


def test_a_switched_off_head_of_the_first_layer_changes_the_maps_of_the_second_only(client):
    on = ask(client, "attention", **QUERY)["weights"]
    off = ask(client, "attention", **QUERY, off=[{"layer": 0, "head": 2}])["weights"]
    assert on[0] == off[0]
    assert on[1] != off[1]


def test_importance_of_a_head_is_the_divergence_without_it(client):
    answer = ask(client, "importance", model="cumulant3", image="example-0", layer=1)
    alone = ask(client, "prediction", model="cumulant3", image="example-0", off=[{"layer": 1, "head": 3}])
    assert answer["divergence"][3] == pytest.approx(alone["divergence"], abs=1e-9)
    best = max(alone["choices"], key=lambda choice: choice["before"])
    assert answer["drop"][3] == pytest.approx(best["before"] - best["after"], abs=2e-6)


def test_summary_has_every_metric_by_layer_and_head(client):
    metrics = {m["name"]: m for m in ask(client, "summary", model="softmax", image="example-0")["metrics"]}
    assert {"negative_mass", "distance", "tokens_used", "class_share"} <= set(metrics)
    assert all(len(m["values"]) == 2 and len(m["values"][0]) == 4 for m in metrics.values())
    assert all(m["title"] and m["meaning"] for m in metrics.values())
    assert torch.tensor(metrics["negative_mass"]["values"]).abs().max() < 1e-6
    assert metrics["distance"]["reference"] == pytest.approx(explain.uniform_distance((4, 4)))


def test_metrics_of_the_class_token_are_left_out_where_there_is_none(examples):
    client = local_client(create_app({"gap": small_model("softmax", pool="gap")}, examples))
    names = {m["name"] for m in ask(client, "summary", model="gap", image="example-0")["metrics"]}
    assert "class_share" not in names
    assert "self_share" in names


def test_a_rollout_keeps_the_sum_of_one_and_relevance_is_not_negative(client):
    flow = ask(client, "flow", **QUERY)
    assert sum(flow["weights"]) == pytest.approx(1, abs=1e-4)
    relevance = ask(client, "flow", **{**QUERY, "query": 0}, kind="relevance")["weights"]
    assert min(relevance) >= 0
    assert max(relevance[1:]) > 0


def test_the_lens_meets_softmax_at_a_small_logit_scale(client):
    def distance(logit_scale):
        maps = ask(client, "lens", **QUERY, layer=0, logit_scale=logit_scale)["maps"]
        return {m["name"]: max(m["distance"]) for m in maps}

    assert max(distance(0).values()) < 1e-5
    low = distance(0.2)
    assert low["cumulant3_full"] < low["cumulant2"] < low["cumulant1"]
    assert low["softmax"] == 0


def test_the_lens_at_logit_scale_one_shows_the_layers_own_weights(client):
    own = ask(client, "attention", **QUERY)["weights"][1]
    maps = {m["name"]: m["weights"] for m in ask(client, "lens", **QUERY, layer=1)["maps"]}
    torch.testing.assert_close(torch.tensor(maps["cumulant3"]), torch.tensor(own), atol=3e-6, rtol=0)


def test_an_interpreter_s_heat_map_is_shown_beside_maps_of_all_tokens(examples):
    torch.manual_seed(0)
    model = create_model("ia_red2_nano_patch2_8", num_classes=10).eval()
    images = torch.randn(1, 1, 8, 8)
    dropped = model(images)
    one = Explorable(model, tuple(map(str, range(10))), 8, (0.5,), (0.5,))
    torch.testing.assert_close(model(images), dropped)  # masked or gone, the answer is the same
    client = local_client(create_app({"red": one}, examples))
    asked = {"model": "red", "image": "example-0", "query": 0}
    assert client.get("/api/info").json()["models"][0]["interpreter"]
    weights = torch.tensor(ask(client, "attention", **asked)["weights"])
    assert weights.shape == (4, 4, 17)
    shown = torch.tensor(ask(client, "flow", **asked, kind="interpreter")["weights"])
    heat = model.heat(one.images(examples[0].picture))[0, -1].flatten()
    torch.testing.assert_close(shown[1:], heat, atol=1e-5, rtol=0)
    assert (heat == 0).any(), "a patch that an earlier interpreter dropped"
    assert (heat > 0).any()


def test_a_model_without_interpreter_says_so(client):
    answer = client.post("/api/flow", json={**QUERY, "kind": "interpreter"})
    assert answer.status_code == 404
    assert answer.json()["error"] == "no_interpreter"


def test_a_gated_model_has_maps_and_says_that_it_has_no_relevance(examples):
    client = local_client(create_app({"gated": small_model("softmax", attention_extras={"gate": True})}, examples))
    assert ask(client, "attention", model="gated", image="example-0", query=1)["weights"]
    answer = client.post("/api/flow", json={"model": "gated", "image": "example-0", "query": 1, "kind": "relevance"})
    assert answer.status_code == 404
    assert answer.json()["error"] == "no_relevance"


@pytest.mark.parametrize(
    ("what", "change", "kind"),
    [
        ("attention", {"model": "nope"}, "unknown_model"),
        ("attention", {"image": "example-9"}, "unknown_image"),
        ("attention", {"query": 17}, "unknown_query"),
        ("attention", {"off": [{"layer": 0, "head": 4}]}, "unknown_head"),
        ("lens", {"layer": 2}, "unknown_layer"),
    ],
)
def test_what_is_not_there_is_named(client, what, change, kind):
    answer = client.post(f"/api/{what}", json={**QUERY, **change})
    assert answer.status_code == 404
    assert answer.json()["error"] == kind


@pytest.mark.parametrize("change", [{"query": -1}, {"query": "6"}, {"query": None}, {"surplus": 1}, {"model": ""}])
def test_a_request_that_is_not_well_formed_is_told_where(client, change):
    answer = client.post("/api/attention", json={**QUERY, **change})
    assert answer.status_code == 422
    assert next(iter(change)) in answer.json()["message"]


def test_a_model_that_diverged_is_told_and_not_drawn(examples):
    broken = small_model("softmax")
    broken.model.blocks[0].attn.qkv.weight.fill_(torch.nan)
    client = local_client(create_app({"broken": broken}, examples), raise_server_exceptions=False)
    answer = client.post("/api/attention", json={"model": "broken", "image": "example-0", "query": 0})
    assert answer.status_code == 500
    assert answer.json()["error"] == "not_finite"


def test_requests_at_the_same_time_do_not_mix_their_switched_off_heads(models, examples, client, monkeypatch):
    questions = [{"model": "softmax", "image": "example-0", "off": [{"layer": 0, "head": h}]} for h in range(4)]
    alone = [ask(client, "prediction", **question)["choices"] for question in questions]
    running, original = [], looking.record

    def slow(*arguments):
        running.append(1)
        assert len(running) == 1, "two computations at once in one model"
        time.sleep(0.02)
        answer = original(*arguments)
        running.pop()
        return answer

    monkeypatch.setattr(looking, "record", slow)
    fresh = local_client(create_app(models, examples))  # the first has remembered its answers
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda question: ask(fresh, "prediction", **question)["choices"], questions))
    assert together == alone


def test_the_picture_is_shown_as_the_model_sees_it(client):
    whole = client.post("/api/images", content=encoded(noise(5, 40))).json()["image"]
    assert client.get(f"/api/images/{whole}").headers["content-type"] == "image/png"
    seen = Image.open(io.BytesIO(client.get(f"/api/images/{whole}", params={"model": "softmax"}).content))
    assert (seen.size, seen.mode) == ((8, 8), "L")


def test_models_too_large_to_sum_up_still_show_their_rows(models, examples):
    client = local_client(create_app(models, examples, Limits(recorded_bytes=1, whole_maps_at_once=1)))
    assert client.post("/api/attention", json=QUERY).status_code == 200
    for what in ("summary", "flow"):
        question = {key: QUERY[key] for key in QUERY if key != "query" or what == "flow"}
        assert client.post(f"/api/{what}", json=question).json()["error"] == "too_many_tokens"


def test_without_models_there_is_no_explorer(examples):
    with pytest.raises(ValueError, match="at least one model"):
        create_app({}, examples)


def test_preprocessing_needs_one_or_three_channels():
    with pytest.raises(ValueError, match="1 or 3 channels"):
        Explorable(small_model("softmax").model, ("a",), 8, mean=(0.5, 0.5), std=(0.5, 0.5))


def test_the_reverse_map_is_a_column_of_all_maps(client):
    asked = {"model": "softmax", "image": "example-0"}
    rows = [client.post("/api/attention", json={**asked, "query": q}).json()["weights"] for q in range(17)]
    column = client.post("/api/attention", json={**asked, "query": 5, "reverse": True}).json()["weights"]
    torch.testing.assert_close(torch.tensor(column), torch.tensor(rows)[..., 5].permute(1, 2, 0), atol=2e-6, rtol=0)


def test_parts_of_a_head_are_left_out_one_by_one(client):
    asked = {"model": "cumulant3", "image": "example-0", "layer": 1, "head": 0}
    parts = {one["name"]: one for one in client.post("/api/parts", json=asked).json()["parts"]}
    assert {"whole head", "class to patches", "patches to patches", "patches at distance 3"} <= set(parts)
    importance = client.post("/api/importance", json={k: v for k, v in asked.items() if k != "head"}).json()
    assert parts["whole head"]["change"] == pytest.approx(importance["divergence"][0], abs=1e-6)
    assert parts["patches to patches"]["lost"] > 0
    refused = client.post("/api/parts", json={**asked, "head": 9})
    assert (refused.status_code, refused.json()["error"]) == (404, "unknown_head")


def test_patterns_put_every_map_into_one_kind(client):
    answer = client.post("/api/patterns", json={"model": "softmax", "images": ["example-0", "example-1"]}).json()
    assert answer["maps"] == 2 * 2 * 4
    assert sum(one["share"] for one in answer["clusters"]) == pytest.approx(1)
    assert [len(layer) for layer in answer["shares"]] == [4, 4]
    assert all(sum(head) == pytest.approx(1, abs=1e-3) for layer in answer["shares"] for head in layer)
    refused = client.post("/api/patterns", json={"model": "softmax", "images": []})
    assert refused.status_code == 422


def test_a_thumbnail_is_the_centre_square_and_never_larger_than_the_picture(models):
    picture = Image.new("RGB", (640, 400), "red")
    client = local_client(create_app(models, [Example(picture), Example(noise(0))]))
    for image, side in (("example-0", 96), ("example-1", 8)):
        content = client.get(f"/api/images/{image}?side=96").content
        assert Image.open(io.BytesIO(content)).size == (side, side)
