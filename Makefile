# Every target with its help text: `make help`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help deps build fmt lint test sanity test-vm test-kube test-e2e test-e2e-up test-crash test-sub-path test-postgres test-etcd demo screenshots bench bench-build bench-up bench-nfs bench-flex bench-group bench-cloud bench-sidecars bench-see bench-dev bench-apiserver fuzz clean

# Go may have been installed here by `make deps`; mkfs and losetup live in sbin.
export PATH := $(CURDIR)/.tools/go/go/bin:$(PATH):/usr/sbin:/sbin

# A static binary runs everywhere, and is a quarter smaller in memory than one with shared libraries.
STATIC := $(shell uname -m)-unknown-linux-musl

# The tests mount and format, so what cargo builds is run as root. One that hangs is to fail, and not to keep the others.
ifneq ($(shell id -u),0)
RUNNER := "sudo", "-E", "env", "PATH=$(PATH)"
AS_ROOT := sudo env PATH=$(PATH)
else
RUNNER := "env"
AS_ROOT :=
endif
CARGO := cargo --config 'target."cfg(unix)".runner = [$(RUNNER)]'
LIMITED := cargo --config 'target."cfg(unix)".runner = [$(RUNNER), "timeout", "--foreground", "--kill-after=10", "1800"]'

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  %-12s %s\n", $$1, $$2 }'

deps: ## install what the tests need and this machine lacks
	@testbed/deps.sh test

BUILD := CC_$(subst -,_,$(STATIC))=musl-gcc cargo build --locked --target $(STATIC) -p berth

build: ## build the release binary, static: target/<machine>-unknown-linux-musl/release/berth
	@testbed/deps.sh release
	$(BUILD) --release

fmt: ## format the code
	cargo fmt --all

lint: ## check format, clippy and docs, warnings being errors
	@testbed/deps.sh lint
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo clippy -p berth-e2e --test kube --test vm --locked -- -D warnings
	cargo clippy -p berth-backends --test nfs_kernel --locked -- -D warnings
	@! cargo deny --version >/dev/null 2>&1 || cargo deny --offline check bans licenses sources
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

test: lint deps ## everything that must pass: lint, all tests, csi-sanity, a short crash run
	cargo build --locked -p berth -p mycsi
	$(LIMITED) test --workspace --locked --no-fail-fast

sanity: deps ## csi-sanity against every kind of local volume, and against the example driver
	cargo build --locked -p berth -p mycsi
	$(CARGO) test --locked -p berth-e2e --test driver -- --nocapture sanity::

# What cargo builds is run in the machine.
VM := ["$(CURDIR)/testbed/vm/vm.sh", "--timeout", "3600", "--env", "NFS_UP=$(CURDIR)/testbed/vm/nfs-up.sh", \
	"--env", "BERTH_BIN=$(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/debug/berth", "--"]
test-vm: deps ## the NFS driver with the kernel's NFS client and server, in a virtual machine that has them: csi-sanity by every version; FlexVolume drivers for NFS
	cargo build --locked -p berth
	cargo --config 'target."cfg(unix)".runner = $(VM)' test --locked -p berth-backends --test nfs_kernel -- --test-threads=1 --nocapture
	cargo --config 'target."cfg(unix)".runner = $(VM)' test --locked -p berth-e2e --test vm -- --test-threads=1 --nocapture

# The real servers run beside whatever else does, with a state, a network and a kubelet's directory of their own.
KUBE := KUBE_STATE=$(HOME)/.cache/kube-testbed/differential PORT=7443 KUBELET_PORT=7449 KUBELET_ROOT=/var/lib/kube-testbed

test-kube: ## on real Kubernetes: compare the API server and run the loops (LEVEL=control; RECORD=1 records its answers), run the sidecars with its controllers (LEVEL=controllers), pods with its kubelet (LEVEL=node); default: all
	@testbed/deps.sh kube
	cargo build --locked -p berth
	export $(KUBE) $(if $(RECORD),BERTH_RECORD=1); . testbed/kube/env.sh; export KUBECONFIG_REAL=$$KUBECONFIG; result=0; \
		up() { testbed/kube/build.sh $$1; $$as env $(KUBE) KUBE_BIN=$$KUBE_BIN testbed/kube/up.sh $$1; }; \
		down() { $$as env $(KUBE) KUBE_BIN=$$KUBE_BIN PURGE=1 testbed/kube/down.sh; }; \
		as=; down; trap down EXIT; \
		for level in $(or $(LEVEL),control controllers node); do \
			[ $$level != node ] || as="$(AS_ROOT)"; \
			up $$level; \
			case $$level in \
			control) \
				cargo test --locked -p berth-controllers --test scenarios -- --test-threads=1 || result=$$?; \
				down; up control; \
				cargo test --locked -p berth-apiserver --test server -- --ignored --test-threads=1 differential:: || result=$$? ;; \
			*) $(CARGO) test --locked -p berth-e2e --test kube -- --test-threads=1 $$level:: || result=$$? ;; \
			esac; \
			down; \
		done; exit $$result

test-e2e: ## Kubernetes' own end-to-end specs of storage (External.Storage) on real Kubernetes, with the drivers as deploy/ installs them: DRIVER (default all, see testbed/kube/e2e.sh), FOCUS, SKIP and PROCS for less; hours
	@testbed/deps.sh kube
	cargo build --locked -p berth
	$(AS_ROOT) env $(if $(FOCUS),FOCUS='$(FOCUS)') $(if $(SKIP),SKIP='$(SKIP)') $(if $(PROCS),PROCS=$(PROCS)) HOME=$(HOME) \
		BERTH_BIN=$(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/debug/berth testbed/kube/e2e.sh $(DRIVER)

test-e2e-up: ## the same specs on `berth up --runtime cri`, with the local driver and this machine's containerd: DRIVER (default all, see testbed/kube/e2e-up.sh), FOCUS, SKIP and PROCS for less; hours
	@testbed/deps.sh kube
	cargo build --locked -p berth
	$(AS_ROOT) env $(if $(FOCUS),FOCUS='$(FOCUS)') $(if $(SKIP),SKIP='$(SKIP)') $(if $(PROCS),PROCS=$(PROCS)) HOME=$(HOME) \
		BERTH_BIN=$(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/debug/berth testbed/kube/e2e-up.sh $(DRIVER)

test-crash: deps ## the long crash runs: KILLS (default 100) kill -9 under load, of the driver on each kind of disk, of `berth up`, of a cloud's driver at every call of its API and by `berth certify`, and of the sidecars at every step; SEED to repeat one
	cargo build --locked -p berth
	BERTH_CRASH_KILLS=$(or $(KILLS),100) $(if $(SEED),BERTH_CRASH_SEED=$(SEED)) \
		$(CARGO) test --locked -p berth-e2e --test driver -- --nocapture crash::
	BERTH_UP_KILLS=$(or $(KILLS),100) $(if $(SEED),BERTH_CRASH_SEED=$(SEED)) \
		$(CARGO) test --locked -p berth-e2e --test cluster -- --nocapture up::crash::nothing_is_lost_or_left_by_kills
	BERTH_RANDOM_OPERATIONS=$(or $(OPERATIONS),1000) $(if $(SEED),BERTH_CRASH_SEED=$(SEED)) \
		$(CARGO) test --locked -p berth-e2e --test cluster -- --nocapture --ignored up::random::
	BERTH_CLOUD_KILLS=0 $(if $(SEED),BERTH_CRASH_SEED=$(SEED)) \
		$(CARGO) test --locked -p berth-e2e --test driver -- --nocapture cloud_faults::a_driver_killed
	BERTH_CLOUD_KILLS=$(or $(KILLS),100) $(if $(SEED),BERTH_CRASH_SEED=$(SEED)) \
		$(CARGO) test --locked -p berth-e2e --test cluster -- --nocapture up::clouds::a_driver_killed
	BERTH_CERTIFY_ALL=1 $(CARGO) test --locked -p berth-e2e --test driver -- --nocapture clouds::the_driver_of
	BERTH_SIDECARS_KILLS=2 $(CARGO) test --locked -p berth-sidecars --test scenarios -- --nocapture crash::
	BERTH_SIDECARS_KILLS=2 $(CARGO) test --locked -p berth-e2e --test cluster -- --nocapture killed_at_any_step

test-sub-path: deps ## start STARTS (default 10,000) containers with a subPath while links out of the volume are put in its way; 10 minutes
	cargo build --locked -p berth
	BERTH_SUB_PATH_STARTS=$(or $(STARTS),10000) $(CARGO) test --locked -p berth-e2e --test cluster -- --nocapture up::sub_path::

test-postgres: deps ## PostgreSQL in a pod while its container and `berth up` are killed, its volume is grown and snapshotted: ROUNDS (default 20)
	cargo build --locked -p berth
	BERTH_POSTGRES_ROUNDS=$(or $(ROUNDS),20) $(CARGO) test --locked -p berth-e2e --test cluster -- --nocapture up::postgres::

test-etcd: deps ## etcd on three nodes with disks of a cloud's twin, while its nodes lose their power under load: ROUNDS (default 10)
	cargo build --locked -p berth
	BERTH_ETCD_ROUNDS=$(or $(ROUNDS),10) $(CARGO) test --locked -p berth-e2e --test cluster -- --nocapture up::etcd::

demo: ## build quickly (3 minutes on 2 cores), and walk one volume through its life, from claim to pod and away again, with times
	@testbed/deps.sh build
	@echo "Building Berth without optimisation: about 3 minutes on 2 cores, once. The times that the demo then shows are"
	@echo "those of an unoptimised program, two to three times what the release (make build) takes."
	cargo build --locked --profile demo -p berth
	@$(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/demo/berth demo

screenshots: deps ## make the pictures of the documentation anew, from a running `berth up`: docs/images
	cargo build --locked -p berth
	$(CARGO) run --locked -p berth-e2e --bin screenshots -- docs/images

bench: deps build ## measure the release binary
	BERTH_BIN=$(CURDIR)/target/$(STATIC)/release/berth $(CARGO) run --profile quick --locked -p berth-e2e --bin bench

bench-build: ## measure building: wall and CPU per crate, sizes, rebuilds after a change; PROFILES (default demo), such as "demo release"
	@testbed/bench-build.sh $(PROFILES)

bench-up: deps build ## measure `berth up`: start, claim to mounted pod, a thousand at once, memory; SINGLES and MANY for less, NODES=10 on several nodes
	BERTH_BIN=$(CURDIR)/target/$(STATIC)/release/berth $(CARGO) run --profile quick --locked -p berth-e2e --bin bench_up

bench-see: deps build ## measure what looking costs: a scrape of the metrics of 10,000 volumes, the doctor, `berth up` at rest; VOLUMES for less
	testbed/bench-see.sh $(CURDIR)/target/$(STATIC)/release/berth

BENCH_VM := testbed/vm/vm.sh --mem 3G --timeout 1800 --env NFS_UP=$(CURDIR)/testbed/vm/nfs-up.sh --env DIRECTORIES --env VERSION
bench-group: ## measure a pod's fsGroup on a volume of a million files: by changing them, by looking at them, by the mount; FILES and DIRECTORY (on the disk to measure) for others
	cargo run --profile quick --locked -p berth-host --example bench_group -- $(or $(DIRECTORY),$(CURDIR)/target/bench-group) $(FILES)

bench-nfs: deps ## measure the NFS driver in the virtual machine, beside mounting by programs as csi-driver-nfs does: create, delete, publish, 10,000 volumes on one share; DIRECTORIES for less, VERSION for 4.0 or 4.2
	cargo build --release --locked -p berth-backends --example bench_nfs
	$(BENCH_VM) -- $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/release/examples/bench_nfs

bench-flex: deps build ## measure call-outs of `berth flex` beside a driver in bash and jq: calls per second, CPU; CALLS for less
	BERTH_BIN=$(CURDIR)/target/$(STATIC)/release/berth $(CARGO) run --profile quick --locked -p berth-e2e --bin bench_flex

bench-cloud: deps build ## count the API calls of 500 cloud disks created, attached to 100 servers, detached and deleted at once on a twin with DigitalOcean's limits, beside csi-digitalocean's pattern (10 minutes); VOLUMES, SERVERS and ACTION for less
	BERTH_BIN=$(CURDIR)/target/$(STATIC)/release/berth $(CARGO) run --profile quick --locked -p berth-e2e --bin bench_cloud

bench-dev: ## measure what the proxy of `berth dev` adds to a call; CALLS for less
	$(CARGO) run --profile quick --locked -p berth-dev --example bench_proxy

bench-sidecars: build ## measure `berth controller` on real Kubernetes: claims per second with and without kube-controller-manager's limits, memory; CLAIMS, FILLED, FULL and FEW for less
	@testbed/deps.sh kube
	testbed/kube/build.sh controllers
	export $(KUBE) BERTH_BIN=$(CURDIR)/target/$(STATIC)/release/berth; . testbed/kube/env.sh; export KUBECONFIG_REAL=$$KUBECONFIG; \
		down() { PURGE=1 testbed/kube/down.sh; }; down; trap down EXIT; \
		KCM_ARGS="--kube-api-qps=1000 --kube-api-burst=1000" testbed/kube/up.sh controllers; \
		LIFTED=1 $(CARGO) run --profile quick --locked -p berth-e2e --bin bench_sidecars; \
		down; testbed/kube/up.sh controllers; \
		$(CARGO) run --profile quick --locked -p berth-e2e --bin bench_sidecars

bench-apiserver: ## measure the API server, beside kube-apiserver and etcd if KUBE_BINARIES (or the usual place) has them
	cargo build --release --locked -p berth-apiserver --example bench
	target/release/examples/bench $(KUBE_BINARIES)

fuzz: ## throw random input at the API server's parsers and patches, SECONDS_EACH (default 600) of it
	BERTH_FUZZ_SECONDS=$(or $(SECONDS_EACH),600) cargo test --release --locked -p berth-apiserver --test server -- --nocapture --test-threads=1 fuzz::

clean: ## remove what was built and installed below this directory
	cargo clean
	rm -rf .tools
