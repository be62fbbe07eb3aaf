#!/bin/sh
# Runs the suite again and again, in another order, time zone, language, umask and place each time.
# Usage: shuffled.sh [LAST [FIRST]], which are rounds; BIN is where Python is, JOBS how many processes there are.
set -eu
rounds=${1:-10}
round=$((${2:-1} - 1))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

choose() { # the ROUND-th of some words, over and over
    shift_by=$1
    shift
    shift $((shift_by % $#))
    echo "$1"
}

failed=
while [ "$round" -lt "$rounds" ]; do
    round=$((round + 1))
    zone=$(choose "$round" UTC Asia/Kathmandu America/St_Johns Pacific/Kiritimati)
    language=$(choose "$round" C C.UTF-8 POSIX)
    mask=$(choose "$round" 022 077 002 027)
    # TensorFlow itself takes brackets in a path for a pattern.
    place="$work/$(choose "$round" plain 'a b' 'ü' "it's")"
    mkdir -p "$place"
    echo "round $round of $rounds: TZ=$zone LC_ALL=$language umask $mask TMPDIR=$place"
    (
        umask "$mask"
        TZ=$zone LC_ALL=$language TMPDIR=$place "$BIN/python" -m pytest -q -n "${JOBS:-2}" \
            --dist worksteal --random-order-seed "$round" --random-order
    ) || failed="$failed $round"
done
[ -z "$failed" ] || { echo "failed in round$failed" >&2; exit 1; }
