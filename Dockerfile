# Two images of the same static program:
#
#   docker build --target berth      -t berth:0.1.0 .        with root certificates and nothing else: for everything that needs no tool
#   docker build --target berth-node -t berth-node:0.1.0 .   with the tools that make and check filesystems: for drivers
#
# `docker buildx build --platform linux/amd64,linux/arm64` builds each for both, every platform on itself or emulated.

FROM docker.io/library/rust:1.95-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends musl-tools \
    && rm -rf /var/lib/apt/lists/* \
    && rustup target add "$(uname -m)-unknown-linux-musl"
WORKDIR /src
COPY . .
# The compiler of C code is named by the target, in which cc looks for underscores.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    target="$(uname -m)-unknown-linux-musl" \
    && env "CC_$(echo "$target" | tr - _)=musl-gcc" cargo build --release --locked --target "$target" -p berth \
    && install -m 0755 "target/$target/release/berth" /berth

FROM scratch AS berth
COPY --from=build /berth /berth
# By these the controllers of clouds judge the certificates of the providers.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
# Fails the build if the program needs anything that is not there.
RUN ["/berth", "--version"]
USER 65532:65532
ENTRYPOINT ["/berth"]

FROM docker.io/library/debian:bookworm-slim AS berth-node
# mkfs.ext4, e2fsck and resize2fs; mkfs.xfs; mkfs.btrfs. Mounting and loop devices need no tools.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends btrfs-progs e2fsprogs xfsprogs \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /berth /berth
RUN /berth --version && for tool in mkfs.ext4 e2fsck resize2fs mkfs.xfs mkfs.btrfs; do command -v "$tool"; done
ENTRYPOINT ["/berth"]
