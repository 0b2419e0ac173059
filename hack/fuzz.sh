#!/usr/bin/env bash
# Runs every fuzzer of the repository, or of the given packages, for the given
# time, one after the other:
#
#   hack/fuzz.sh 20s [./router/scan …]
set -euo pipefail
cd "$(dirname "$0")/.."
each=${1:-20s}
shift || true
packages=("$@")
if [ ${#packages[@]} -eq 0 ]; then
	mapfile -t packages < <(grep -rlE '^func Fuzz[A-Za-z0-9_]+\(' --include='*_test.go' . | xargs -n1 dirname | sort -u)
fi

found=0
for dir in "${packages[@]}"; do
	for name in $(grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$dir"/*_test.go | sed 's/^func //' | sort -u); do
		echo "== $dir $name ($each)"
		go test "$dir" -run '^$' -fuzz "^$name\$" -fuzztime "$each"
		found=$((found + 1))
	done
done
[ "$found" -gt 0 ] || { echo "fuzz: no fuzzer in ${packages[*]}" >&2; exit 1; }
