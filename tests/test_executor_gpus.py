"""GPUs found in a file system that is made up: which, under what names, and what variables hide of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.gpus import Gpus, find_gpus

CUDA = "__version__ = '2.9.0'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\nrocm: Optional[str] = None\n"
ROCM = "__version__ = '2.9.0+rocm6.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4.43483'\n"
CORES = "__version__ = '2.9.0+cpu'\ndebug = False\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"


def written(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def node(root: Path, number: int, *, simd_count: int, minor: int = 0, gfx: int = 0, name: str = "") -> None:
    """A node of the kernel's topology, its render device, and the name of its board."""
    properties = {
        "cpu_cores_count": 0 if simd_count else 96,
        "simd_count": simd_count,
        "gfx_target_version": gfx,
        "vendor_id": 4098 if simd_count else 0,
        "drm_render_minor": minor,
        "unique_id": 18446744073709551615,
    }
    file = root / f"sys/class/kfd/kfd/topology/nodes/{number}/properties"
    written(file, "".join(f"{key} {value}\n" for key, value in properties.items()))
    if minor:
        written(root / f"dev/dri/renderD{minor}", "")
        written(root / f"sys/class/drm/renderD{minor}/device/product_name", f"{name}\n")


@pytest.fixture
def amd(tmp_path: Path) -> Path:
    """Two sockets with three MI300X, one of which is kept from this container, and an RX 7900 XTX."""
    node(tmp_path, 0, simd_count=0)
    node(tmp_path, 1, simd_count=0)
    for number, minor in ((2, 128), (3, 136), (4, 144)):
        node(tmp_path, number, simd_count=1216, minor=minor, gfx=90402, name="AMD INSTINCT MI300X OAM")
    node(tmp_path, 10, simd_count=192, minor=152, gfx=110000)
    (tmp_path / "dev/dri/renderD136").unlink()
    return tmp_path


@pytest.fixture
def nvidia(tmp_path: Path) -> Path:
    """Two H100 beside the files that are no GPU."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        written(tmp_path / "dev" / name, "")
    for bus in ("0000:19:00.0", "0000:3b:00.0"):
        text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t GPU-0e3fa5a1\n"
        written(tmp_path / f"proc/driver/nvidia/gpus/{bus}/information", text)
    return tmp_path


def test_amd_gpus_are_nodes_that_compute_and_may_be_opened(amd: Path) -> None:
    assert find_gpus(ROCM, amd, {}) == Gpus(kind="rocm", ids=("0", "1", "2"), name="AMD INSTINCT MI300X OAM")


@pytest.mark.parametrize(
    ("variables", "ids", "name"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,0"}, ("2", "0"), "AMD gfx1100"),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,2"}, ("1",), "AMD INSTINCT MI300X OAM"),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, ("0", "2"), "AMD INSTINCT MI300X OAM"),
        ({"ROCR_VISIBLE_DEVICES": "2,1"}, ("0", "1"), "AMD gfx1100"),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1,2"}, ("1",), "AMD INSTINCT MI300X OAM"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-4b2c1a9f8d3e6f7a"}, ("0",), "AMD INSTINCT MI300X OAM"),
    ],
)
def test_variables_hide_amd_gpus_at_two_levels(
    amd: Path, variables: dict[str, str], ids: tuple[str, ...], name: str
) -> None:
    assert find_gpus(ROCM, amd, variables) == Gpus(kind="rocm", ids=ids, name=name)


def test_a_name_is_the_instruction_set_where_the_board_has_none(tmp_path: Path) -> None:
    node(tmp_path, 1, simd_count=416, minor=128, gfx=90010)
    assert find_gpus(ROCM, tmp_path, {}) == Gpus(kind="rocm", ids=("0",), name="AMD gfx90a")


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        (None, ("0", "1")),
        ("1,0", ("1", "0")),
        (" 1 ", ("1",)),
        ("1,1", ("1",)),
        ("0,-1,1", ("0",)),
        ("0,2,1", ("0",)),
        ("GPU-8932f937,GPU-0e3fa5a1-d72c", ("GPU-8932f937", "GPU-0e3fa5a1-d72c")),
        ("MIG-c6d4f1ef-42e4", ("MIG-c6d4f1ef-42e4",)),
    ],
)
def test_a_variable_hides_nvidia_gpus(nvidia: Path, asked: str | None, ids: tuple[str, ...]) -> None:
    variables = {"ROCR_VISIBLE_DEVICES": ""} | ({} if asked is None else {"CUDA_VISIBLE_DEVICES": asked})
    assert find_gpus(CUDA, nvidia, variables) == Gpus(kind="cuda", ids=ids, name="NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize("asked", ["", "-1", "2", "none"])
def test_what_leaves_no_gpu_leaves_the_cores(nvidia: Path, asked: str) -> None:
    assert find_gpus(CUDA, nvidia, {"CUDA_VISIBLE_DEVICES": asked}) is None


def test_torch_has_the_gpus_that_it_was_built_for(nvidia: Path) -> None:
    """A processor with graphics of its own is no GPU to a torch for cores or for NVIDIA's."""
    node(nvidia, 1, simd_count=4, minor=128, gfx=100306)
    found = find_gpus(CUDA, nvidia, {})
    assert found is not None and (found.kind, len(found.ids)) == ("cuda", 2)
    assert find_gpus(ROCM, nvidia, {}) == Gpus(kind="rocm", ids=("0",), name="AMD gfx1036")
    assert find_gpus(CORES, nvidia, {}) is None


def test_a_machine_without_gpus_has_none(tmp_path: Path) -> None:
    assert find_gpus(CUDA, tmp_path, {"CUDA_VISIBLE_DEVICES": "GPU-0e3fa5a1"}) is None
    assert find_gpus(ROCM, tmp_path, {"HIP_VISIBLE_DEVICES": "0"}) is None


def test_a_worker_is_given_its_gpu_by_the_name_that_the_runtime_knows() -> None:
    assert Gpus(kind="rocm", ids=("2", "0"), name="").variables(1) == {"HIP_VISIBLE_DEVICES": "0"}
    assert Gpus(kind="cuda", ids=("3", "5"), name="").variables(0, 1) == {"CUDA_VISIBLE_DEVICES": "3,5"}
