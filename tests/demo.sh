# What `make demo` shows: the commands on a copy of checkpoints that PyTorch and Keras wrote.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
ckpttool="$here/$BIN/ckpttool"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$here/fixtures/files/series" "$work/runs"
cp "$here/fixtures/files/pytorch/guide.pth" "$work/model_checkpoint.pth"
cp "$here/fixtures/files/twins/twin.pth" "$work/torch_model.pth"
cd "$work"
tar -xJf "$here/fixtures/files/twins/others.tar.xz" twin.keras
mv twin.keras keras_model.keras

run() {
    printf '\n$ ckpttool %s\n' "$*"
    "$ckpttool" "$@"
}

run inspect model_checkpoint.pth
run verify model_checkpoint.pth runs
run diff runs/model_epoch_9.pth runs/model_epoch_10.pth || [ $? -eq 1 ] # 1: they differ
run diff torch_model.pth keras_model.keras
run convert model_checkpoint.pth model.safetensors
run diff model_checkpoint.pth model.safetensors
run list runs
run prune runs --keep 3 --yes
run list runs
run latest runs
printf '\nThat is ckpttool. Next: README.md, or %s --help\n' "$BIN/ckpttool"
