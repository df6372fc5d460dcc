# The library gradcomm_cuda.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90)  # 90: code for it, and PTX for what comes after
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)  # the most that CMake 3.25 knows how to ask nvcc for
set(CMAKE_CUDA_STANDARD_REQUIRED ON)

file(GLOB GRADCOMM_KERNELS CONFIGURE_DEPENDS csrc/cuda/*.cu)
add_library(gradcomm_cuda SHARED csrc/cuda/bindings.cpp ${GRADCOMM_KERNELS})
# Neither contraction nor flushing of denormals nor approximate division: the same bytes everywhere.
target_compile_options(gradcomm_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>
  $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false -ftz=false -prec-div=true -prec-sqrt=true -Xptxas=-v>)
target_compile_definitions(gradcomm_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:USE_CUDA TORCH_TARGET_VERSION=0x020b000000000000>)
target_include_directories(gradcomm_cuda SYSTEM PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:${TORCH_DIR}/include>)
# --no-as-needed: aoti_torch_get_current_cuda_stream is in none of a CPU torch's libraries, and in a
# CUDA torch it is found through libtorch.so alone. Undefined symbols are left to the loading.
target_link_options(gradcomm_cuda PRIVATE -Wl,--no-as-needed -Wl,-z,lazy)
target_link_libraries(gradcomm_cuda PRIVATE "${TORCH_DIR}/lib/libtorch.so" "${TORCH_DIR}/lib/libtorch_cpu.so")

# What ptxas says, as a table that CI can print; a spill fails the build.
set(GRADCOMM_PTXAS_REPORT "${CMAKE_BINARY_DIR}/ptxas.txt")
set(report "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/report.py")
set_target_properties(gradcomm_cuda PROPERTIES
  CUDA_RUNTIME_LIBRARY Static
  CUDA_COMPILER_LAUNCHER "${report};collect;${CMAKE_BINARY_DIR}/ptxas"
  BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "")
add_custom_command(TARGET gradcomm_cuda POST_BUILD
  COMMAND ${report} check "${CMAKE_BINARY_DIR}/ptxas" "${GRADCOMM_PTXAS_REPORT}" VERBATIM)

install(TARGETS gradcomm_cuda LIBRARY DESTINATION gradcomm/lib)
