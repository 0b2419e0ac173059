#!/usr/bin/env bash
# Fails when a generated file, the formatting or a go.mod is out of date.
set -euo pipefail
cd "$(dirname "$0")/.."

fail=0
complain() {
	echo "verify: $1" >&2
	fail=1
}

unformatted=$(git ls-files '*.go' | xargs gofmt -l)
[ -z "$unformatted" ] || complain "gofmt these files: $unformatted"

# Regeneration works on a copy, so that a failed verify leaves the tree alone.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git ls-files -z | xargs -0 tar cf - | tar xf - -C "$work"
(cd "$work" && make --no-print-directory manifests >/dev/null && go mod tidy)
while IFS= read -r file; do
	cmp -s "$file" "$work/$file" || complain "$file is out of date: run 'make manifests' and 'go mod tidy'"
done < <(git ls-files 'go.mod' 'go.sum' '*zz_generated*' 'config/crd/bases/*')
for file in "$work"/config/crd/bases/*; do
	[ -e "config/crd/bases/${file##*/}" ] || complain "config/crd/bases/${file##*/} is missing: run 'make manifests'"
done

# What the project promises to newcomers has to exist.
for target in demo test lint verify; do
	grep -q "^$target:" Makefile || complain "Makefile has no target $target"
done
while IFS= read -r link; do
	[ -e "$link" ] || complain "README.md links to $link, which does not exist"
done < <(grep -oE '\]\((docs|config|hack|api|router)/[^)#]*' README.md | sed 's/^](//')

exit $fail
