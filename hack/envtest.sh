#!/usr/bin/env bash
# Builds a Kubernetes control plane from its Go modules, once, and prints the
# folder it is in, for KUBEBUILDER_ASSETS. Arguments name programs; the default
# is what envtest needs. The folder lies outside the tree and is keyed by the
# go.sum files and the Go version, so an upgrade builds anew and a fresh clone
# does not. Progress goes to standard error. Takes minutes on a cold machine.
set -euo pipefail
cd "$(dirname "$0")/tools"

go=${GO:-go}
programs=("$@")
[ $# -gt 0 ] || programs=(kube-apiserver etcd kubectl)

key=$( { cat kubernetes/go.sum etcd/go.sum; "$go" version; } | sha256sum | cut -c1-16)
dir=${XDG_CACHE_HOME:-$HOME/.cache}/kvc/tools/$key
mkdir -p "$dir"

# Without these the server calls itself v0.0.0-master, and clients that ask for
# a minimum version refuse it.
version=$(sed -n 's|.*k8s.io/kubernetes \(v[0-9.]*\).*|\1|p' kubernetes/go.mod | head -1)
minor=${version#v1.}
stamp="-s -w"
for p in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
	stamp+=" -X $p.gitVersion=$version -X $p.gitMajor=1 -X $p.gitMinor=${minor%%.*} -X $p.gitTreeState=clean"
done

# build makes one program. It appears under its name only when it is whole.
build() {
	local name=$1 module=kubernetes package=k8s.io/kubernetes/cmd/$1 flags=$stamp
	if [ "$name" = etcd ]; then
		module=etcd package=go.etcd.io/etcd/server/v3 flags="-s -w"
	fi
	echo "envtest: building $name into $dir (minutes, once)" >&2
	(cd "$module" && CGO_ENABLED=0 "$go" build -trimpath -ldflags "$flags" -o "$dir/.$name.part" "$package" >&2)
	mv "$dir/.$name.part" "$dir/$name"
}

missing=()
for name in "${programs[@]}"; do
	[ -x "$dir/$name" ] || missing+=("$name")
done
if [ ${#missing[@]} -gt 0 ]; then
	# Two test runs on one machine build once: the second waits, then finds all.
	exec 9>"$dir/.lock"
	if command -v flock >/dev/null; then
		flock -n 9 || { echo "envtest: waiting for another build in $dir" >&2; flock 9; }
	fi
	for name in "${missing[@]}"; do
		[ -x "$dir/$name" ] || build "$name"
	done
fi
echo "$dir"
