"""What distinguishes the blocks of two engines although their tokens are the same."""

from copy import deepcopy
from types import SimpleNamespace as Config

import pytest
import torch

from mooncake_kernels.errors import Unavailable
from mooncake_serving.connectors.vllm.namespace import identity_of, namespace_of, refuse_unnamed
from mooncake_serving.connectors.vllm.settings import parse

CONFIG = Config(
    model_config=Config(
        model="org/model",
        revision=None,
        hf_config=Config(_commit_hash="1a2b"),
        hf_overrides={},
        dtype=torch.bfloat16,
        quantization=None,
        quantization_config=None,
        max_model_len=8192,
    ),
    cache_config=Config(
        cache_dtype="auto",
        kv_cache_dtype_skip_layers=[],
        kv_cache_layout="LBNHC",
        enable_prefix_caching=True,
    ),
    load_config=Config(load_format="auto"),
    attention_config=Config(backend=None, backend_per_kind={}),
    speculative_config=None,
    lora_config=None,
)
DRAFT = Config(method="eagle3", model="org/draft", revision=None)
FORM = "FullAttentionSpec(block_size=16, num_kv_heads=8)"


def namespace(config=CONFIG, version="0.32.0", platform="cuda", form=FORM):
    return namespace_of(config, version, platform, form)


def larger(config):
    return config


def test_namespace_is_the_same_in_every_process():
    assert namespace() == namespace(deepcopy(CONFIG))
    config = deepcopy(CONFIG)
    config.model_config.hf_overrides = larger
    assert " at 0x" not in namespace(config)  # where a function is in memory


@pytest.mark.parametrize(
    "part, name, value",
    [
        ("model_config", "model", "org/other"),
        ("model_config", "revision", "v2"),
        ("model_config", "hf_config", Config(_commit_hash="3c4d")),
        ("model_config", "hf_overrides", {"rope_parameters": {"factor": 2.0}}),
        ("model_config", "hf_overrides", larger),
        ("model_config", "hf_config", Config(_commit_hash="1a2b", to_dict=lambda: {"theta": 5})),
        ("model_config", "multimodal_config", Config(mm_processor_kwargs={"fps": 4})),
        ("model_config", "dtype", torch.float16),
        ("model_config", "quantization", "fp8"),
        ("model_config", "quantization_config", {"bits": 4}),
        ("model_config", "max_model_len", 131072),
        ("cache_config", "cache_dtype", "fp8_e5m2"),
        ("cache_config", "kv_cache_dtype_skip_layers", ["0"]),
        ("cache_config", "kv_cache_layout", "LBHNC"),
        ("load_config", "load_format", "dummy"),
        ("attention_config", "backend", "FLASHINFER"),
        ("attention_config", "backend_per_kind", {"full_attention": "FLASHINFER"}),
        (None, "speculative_config", DRAFT),
    ],
)
def test_different_configurations_have_different_namespaces(part, name, value):
    config = deepcopy(CONFIG)
    setattr(getattr(config, part) if part else config, name, value)
    assert namespace(config) != namespace()


def test_version_platform_and_layout_are_part_of_the_namespace():
    others = [{"version": "0.33.0"}, {"platform": "rocm"}, {"form": FORM.replace("16", "32")}]
    assert len({namespace(), *(namespace(**other) for other in others)}) == 4


def test_adapters_require_an_explicit_setting():
    config = deepcopy(CONFIG)
    refuse_unnamed(config, parse({"url": "shm:/p"}))
    config.lora_config = Config(max_lora_rank=16)
    for settings in ({"url": "shm:/p"}, {"url": "shm:/p", "adapters_by_name": False}):
        with pytest.raises(Unavailable, match="^StoreConnector: adapters_by_name must be set with"):
            refuse_unnamed(config, parse(settings))
    refuse_unnamed(config, parse({"url": "shm:/p", "adapters_by_name": True}))


def test_scales_calculated_at_the_first_step_are_rejected():
    config = deepcopy(CONFIG)
    config.cache_config.calculate_kv_scales = False
    refuse_unnamed(config, parse({"url": "shm:/p"}))
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(Unavailable, match="^StoreConnector: calculate_kv_scales must be off"):
        refuse_unnamed(config, parse({"url": "shm:/p"}))


def test_images_that_vllm_only_numbers_are_rejected():
    config = deepcopy(CONFIG)
    config.model_config.multimodal_config = Config(mm_processor_cache_gb=0)
    refuse_unnamed(config, parse({"url": "shm:/p"}))
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(Unavailable, match="^StoreConnector: mm_processor_cache_gb must be above 0"):
        refuse_unnamed(config, parse({"url": "shm:/p"}))
    config.model_config.multimodal_config.mm_processor_cache_gb = 4
    refuse_unnamed(config, parse({"url": "shm:/p"}))


def test_engines_that_hand_over_may_differ_in_layout_and_not_in_values():
    other = deepcopy(CONFIG)
    other.cache_config.kv_cache_layout = "BHLNC"
    other.model_config.max_model_len = 1024
    other.load_config.load_format = "dummy"
    name = identity_of(CONFIG, "", "cuda")
    assert name == identity_of(other, "", "cuda") and "org/model 1a2b" in name
    assert len(identity_of(CONFIG, "m" * 600, "cuda")) < 512
    for part, field, value in (
        ("cache_config", "cache_dtype", "fp8_e5m2"),
        ("model_config", "dtype", torch.float16),
        ("model_config", "revision", "v2"),
        ("model_config", "quantization", "fp8"),
        ("model_config", "hf_overrides", {"rope_parameters": {"factor": 2.0}}),
    ):
        other = deepcopy(CONFIG)
        setattr(getattr(other, part), field, value)
        assert identity_of(other, "", "cuda") != name
    assert identity_of(CONFIG, "", "cpu") != name
    other.model_config.model, other.model_config.hf_overrides = "/models/m", {}
    assert identity_of(CONFIG, "m", "cuda") == identity_of(other, "m", "cuda")


def test_namespace_fields_do_not_run_together():
    one, two = deepcopy(CONFIG), deepcopy(CONFIG)
    one.model_config.model, one.model_config.revision = "a/b", "c"
    two.model_config.model, two.model_config.revision = "a", "b/c"
    assert namespace(one) != namespace(two)
