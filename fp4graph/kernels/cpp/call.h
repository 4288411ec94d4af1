// One call of a kernel, as fp4graph/kernels/abi.py fills it in.

#pragma once

#include "blockwise.h"
#include "noise.h"
#include "rotation.h"

namespace {

struct Matrix {
    void* data;
    Strides strides;
};

struct Call {
    Matrix x;  // what is read, with columns from `places`
    Places places;
    Matrix y;  // what is written
    u8* codes;  // bytes of an operand, read or written
    void* scales;
    BlockwiseParts given;
    BlockRotation rotation;
    KeyParts draw;
    Shape shape;  // of y
    int threads;
};

}  // namespace
