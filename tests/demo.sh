# What `make demo` shows: three commands on a copy of checkpoints that PyTorch wrote.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
ckpttool="$here/$BIN/ckpttool"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$here/fixtures/files/series" "$work/runs"
cp "$here/fixtures/files/pytorch/guide.pth" "$work/model_checkpoint.pth"
cd "$work"

run() {
    printf '\n$ ckpttool %s\n' "$*"
    "$ckpttool" "$@"
}

run inspect model_checkpoint.pth
run verify model_checkpoint.pth runs
run list runs
run prune runs --keep 3 --yes
run list runs
run latest runs
printf '\nThat is ckpttool. Next: README.md, or %s --help\n' "$BIN/ckpttool"
