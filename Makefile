# Targets for people and CI. Tools are pinned, one Go module each, under
# hack/tools; `go tool` builds them into the Go build cache, keyed by go.sum.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BIN       := bin
PROGRAMS  := kvc router sidecar emulator
TOOLS     := hack/tools
CRDS      := config/crd/bases
FUZZTIME  ?= 20s
BENCHTIME ?= 1s
GO        ?= go
LINT      := $(GO) tool -modfile=$(TOOLS)/golangci-lint/go.mod golangci-lint
CTRLGEN   := $(GO) tool -modfile=$(TOOLS)/controller-gen/go.mod controller-gen

.PHONY: help
help: ## List the targets.
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the programs into bin/.
	@mkdir -p $(BIN)
	$(GO) build -trimpath -o $(BIN)/ $(PROGRAMS:%=./cmd/%)

.PHONY: demo
demo: build ## Run the main job: a 1P3D pool on this machine serves agent sessions.
	$(BIN)/kvc demo $(DEMO_FLAGS)

# What the envtest suites run against: a control plane built from Go modules,
# once. hack/envtest.sh prints its folder.
ENVTEST = assets="$$(./hack/envtest.sh)" && KUBEBUILDER_ASSETS="$$assets" KUBEBUILDER_CONTROLPLANE_START_TIMEOUT=180s

.PHONY: test
test: ## Run every test with the race detector.
	$(ENVTEST) $(GO) test -race -timeout 20m $(TEST_FLAGS) ./...

.PHONY: envtest
envtest: ## Run the suites against a real API server.
	$(ENVTEST) $(GO) test -timeout 20m ./test/envtest/... $(TEST_FLAGS)

.PHONY: deflake
deflake: ## Run the tests of PKG (default: all) ten times.
	$(GO) test -race -timeout 60m -count=10 $(or $(PKG),./...)

.PHONY: lint
lint: ## Check style, complexity and the dependency rule.
	$(LINT) run ./...
	$(GO) test ./test/arch

.PHONY: generate
generate: ## Regenerate deepcopy code.
	$(CTRLGEN) object:headerFile=hack/boilerplate.go.txt paths=./api/...

.PHONY: manifests
manifests: generate ## Regenerate everything that is made from the API types.
	rm -f $(CRDS)/*.yaml
	$(CTRLGEN) crd:generateEmbeddedObjectMeta=true paths=./api/... output:crd:dir=$(CRDS)
	$(GO) run ./hack/crdtrim $(CRDS)

.PHONY: verify
verify: ## Fail when generated files, formatting or go.mod are out of date.
	./hack/verify.sh

.PHONY: fuzz
fuzz: ## Run every fuzzer (or those of FUZZPKG) for FUZZTIME (default 20s) each.
	./hack/fuzz.sh $(FUZZTIME) $(FUZZPKG)

.PHONY: independent
independent: ## Let SGLang's own router and the openai client use our side (needs Python and PyPI).
	./hack/independent.sh

.PHONY: bench
bench: ## Run the benchmarks.
	$(GO) test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) ./...

.PHONY: clean
clean: ## Remove what build made.
	rm -rf $(BIN)
