#!/usr/bin/env bash
# Runs every fuzzer of the repository, or of the given packages, for the given
# time, one after the other:
#
#   hack/fuzz.sh 20s [./router/scan …]
set -euo pipefail
cd "$(dirname "$0")/.."
each=${1:-20s}

# go test reports "context deadline exceeded" when a worker of a busy machine is
# late to stop at the end of the time. Without a failing input it says nothing.
fuzz() {
	local out
	if out=$(go test "$1" -run '^$' -fuzz "^$2\$" -fuzztime "$each" 2>&1 </dev/null); then
		tail -n 1 <<<"$out"
		return
	fi
	if grep -q 'context deadline exceeded' <<<"$out" && ! grep -q 'Failing input' <<<"$out"; then
		echo "late to stop, no failing input"
		return
	fi
	echo "$out"
	return 1
}
shift || true
packages=("$@")
if [ ${#packages[@]} -eq 0 ]; then
	mapfile -t packages < <(grep -rlE '^func Fuzz[A-Za-z0-9_]+\(' --include='*_test.go' . | xargs -n1 dirname | sort -u)
fi

found=0
for dir in "${packages[@]}"; do
	for name in $(grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$dir"/*_test.go | sed 's/^func //' | sort -u); do
		echo "== $dir $name ($each)"
		fuzz "$dir" "$name"
		found=$((found + 1))
	done
done
[ "$found" -gt 0 ] || { echo "fuzz: no fuzzer in ${packages[*]}" >&2; exit 1; }
