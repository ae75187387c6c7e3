#!/usr/bin/env bash
# Test and measure on a GPU, most valuable first, within a budget; also on a node without a network:
#     bash tools/benchmarks/gpu.sh [--authors FOLDER] [PART ...]
# In a checkout. Each part writes work_dirs/gpu/PART.txt while it runs, and page.md there has all of them, also those
# of earlier calls. A part that fails or runs out of time stops no other. Without names: smoke tests bench compiled
# digits methods tokens profile. By name only: `compare`, compiled losses against eager ones, which takes minutes.
#     --authors FOLDER  a clone of the authors' repository, measured beside
#     BUDGET   seconds for all (600)                PYTHON  the interpreter (that of `make setup`)
#     OUT      results (work_dirs/gpu)              WHEELS  what the interpreter lacks, of fetch_wheels.sh
#     CASES    models and images of a step          DRY=1   the same without a GPU: tiny, on the CPU
#     COMPILE  True: digits trains compiled (False)
set -uo pipefail
START=$(date +%s)
TOOLS=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$TOOLS/python.sh"
BUDGET=${BUDGET:-600}
OUT=${OUT:-work_dirs/gpu}
WHEELS=${WHEELS:-work_dirs/wheels}
AUTHORS=()
if [ "${1:-}" = --authors ]; then
    [ $# -gt 1 ] || { echo "error: --authors FOLDER: a clone of the authors' repository" >&2; exit 2; }
    AUTHORS=(--authors "$2")
    shift 2
fi
ALL_PARTS=(smoke tests bench compiled digits methods tokens profile compare)
PARTS=("$@")
[ $# -gt 0 ] || PARTS=("${ALL_PARTS[@]:0:8}")

for name in "${PARTS[@]}"; do
    case " ${ALL_PARTS[*]} " in
        *" $name "*) ;;
        *)
            echo "error: no part is called $name: ${ALL_PARTS[*]}" >&2
            exit 2
            ;;
    esac
done
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
FAILED=0
export PYTHONPATH="$OUT/site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR="$OUT/inductor"
THROUGHPUT=("$PYTHON" tools/benchmarks/pretrain_throughput.py)
TOKENS=("$PYTHON" tools/benchmarks/clip_features.py)
GPU_TESTS=(-m "gpu and not slow")
COMPARED=(-m "gpu and slow")
EPOCHS=4
ALL_CASES=${CASES:-tiny:256 tiny:128 small:128 base:64 base:128}
COMPILED_CASES=${CASES:-tiny:128 tiny:256 base:64}
FEW_CASES=${CASES:-tiny:256 base:64}
COMPILE=${COMPILE:-False}
if [ -n "${DRY:-}" ]; then
    export CUDA_VISIBLE_DEVICES=
    THROUGHPUT+=(--dry-run)
    TOKENS+=(--dry-run)
    EPOCHS=1
    ALL_CASES=tiny:2
    COMPILED_CASES=tiny:2
    FEW_CASES=tiny:2
fi

left() { echo $((BUDGET - $(date +%s) + START)); }

# part NAME LEAST MOST COMMAND...: run it for MOST seconds at most, if LEAST seconds are left.
part() {
    local name=$1 least=$2 limit=$3 begun rest said
    shift 3
    rest=$(left)
    if [ "$rest" -lt "$least" ]; then
        say "$name: not run, $rest s left"
        return
    fi
    # On a CPU a part may take all that is left.
    if [ -n "${DRY:-}" ] || [ "$rest" -lt "$limit" ]; then
        limit=$rest
    fi
    begun=$(date +%s)
    timeout --kill-after=5 "$limit" "$@" > "$OUT/$name.txt" 2>&1
    case $? in
        0) said="done in" ;;
        124 | 137) said="cut off after" ;;
        *)
            said="FAILED after"
            FAILED=1
            ;;
    esac
    say "$name: $said $(($(date +%s) - begun)) s"
}

say() {
    echo "$*" | tee -a "$OUT/summary.txt"
    write_page
}

# One page: what ran, on what, and every table so far.
write_page() {
    {
        echo "# On a GPU, $(date -u +%Y-%m-%d)"
        printf '\n```text\n%s\n```\n\n```text\n%s\n```\n' "$(cat "$OUT/machine.txt")" "$(cat "$OUT/summary.txt")"
        for name in "${ALL_PARTS[@]}"; do
            [ -s "$OUT/$name.txt" ] || continue
            printf '\n## %s\n\n' "$name"
            case $name in
                tests | compare) grep -E '^(FAILED|ERROR|XFAIL|[0-9]+ )|passed|failed' "$OUT/$name.txt" | sed 's/^/    /' ;;
                profile) sed 's/^/    /' "$OUT/$name.txt" ;;
                digits) tail -n 5 "$OUT/$name.txt" | cut -c1-200 | sed 's/^/    /' ;;
                *) grep -E '^(#|\||$)|cut off|ended with|medians' "$OUT/$name.txt" ;;
            esac
        done
    } > "$OUT/.page.md"
    mv "$OUT/.page.md" "$OUT/page.md"
}

describe() {
    echo "commit     $(git rev-parse HEAD 2>/dev/null || echo unknown)"
    nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader 2>/dev/null
    "$PYTHON" -c "from mapet_mm.dependencies import version_report; print(version_report())" 2>&1
    "$PYTHON" -c "import torch; print('cuDNN', torch.backends.cudnn.version(), 'GPU', torch.cuda.is_available())"
    echo "cores      $(nproc)"
}

# The whole road on handwritten digits: images, codebook, tokens, training by torchrun, k-NN.
digits() {
    set -e
    local config=configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py work=$OUT/digits
    "$PYTHON" tools/dataset_converters/digits.py
    "$PYTHON" tools/fit_codebook.py configs/micro/kclip.py
    "$PYTHON" tools/extract_tokens.py configs/micro/kclip.py
    PYTHON=$PYTHON bash tools/dist_train.sh $config 1 --amp --work-dir "$work" --cfg-options \
        train_cfg.max_epochs="$EPOCHS" compile="$COMPILE"
    "$PYTHON" tools/evaluate_features.py $config "$work/epoch_$EPOCHS.pth" --protocols NearestNeighbours \
        --cache "$work/features" --out "$work/evaluation"
}
export -f digits
export PYTHON OUT EPOCHS COMPILE

if compgen -G "$WHEELS/*.whl" > /dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target "$OUT/site" "$WHEELS"/*.whl || exit 1
fi
describe > "$OUT/machine.txt"
if [ -z "${DRY:-}" ] && ! grep -q "GPU True" "$OUT/machine.txt"; then
    cat "$OUT/machine.txt" >&2
    echo "error: PyTorch finds no GPU here; DRY=1 tries the parts on the CPU" >&2
    exit 1
fi
say "== $(date -u +%H:%M) UTC: ${PARTS[*]}, $BUDGET s"
# The files with tests for a GPU alone, because the others' imports may be missing here.
mapfile -t FILES < <(grep -rlE "mark\.gpu" tests --include='test_*.py')
for name in "${PARTS[@]}"; do
    case $name in
        smoke) part smoke 20 90 "${THROUGHPUT[@]}" --cases tiny:8 --variants eager --repeats 1 --seconds 0 ;;
        tests) part tests 40 180 "$PYTHON" -m pytest -q -rfEx -p no:cacheprovider "${GPU_TESTS[@]}" "${FILES[@]}" ;;
        compare) part compare 120 300 "$PYTHON" -m pytest -q -rfEx -p no:cacheprovider "${COMPARED[@]}" "${FILES[@]}" ;;
        bench) part bench 40 240 "${THROUGHPUT[@]}" --limit 90 --cases $ALL_CASES --variants eager loop "${AUTHORS[@]}" ;;
        compiled) part compiled 80 330 "${THROUGHPUT[@]}" --cases $COMPILED_CASES --variants eager compiled compiled_loop graphs ;;
        methods) part methods 40 150 "${THROUGHPUT[@]}" --limit 75 --cases $FEW_CASES --variants eager pim mim visible_mim beit ;;
        profile) part profile 40 240 "${THROUGHPUT[@]}" --cases $COMPILED_CASES --variants eager compiled graphs --repeats 1 --profile ;;
        tokens) part tokens 20 90 "${TOKENS[@]}" ;;
        digits) part digits 60 200 bash -c digits ;;
    esac
done
say "$(($(date +%s) - START)) s in all"
echo "wrote $OUT/page.md"
exit $FAILED
