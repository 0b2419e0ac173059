#!/usr/bin/env bash
# Runs every fuzzer of the repository for the given time, one after the other.
set -euo pipefail
cd "$(dirname "$0")/.."
each=${1:-20s}

grep -rlE '^func Fuzz[A-Za-z0-9_]+\(' --include='*_test.go' . | xargs -n1 dirname | sort -u | while read -r dir; do
	grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$dir"/*_test.go | sed 's/^func //' | sort -u | while read -r name; do
		echo "== $dir $name ($each)"
		go test "$dir" -run '^$' -fuzz "^$name\$" -fuzztime "$each"
	done
done
